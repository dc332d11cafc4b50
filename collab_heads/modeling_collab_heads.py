"""Loads a model that collab_heads changed, for `AutoModel.from_pretrained(..., trust_remote_code=True)`.

It does no more than import the package collab_heads, whose README says how to install it: the models are those of
transformers. Beside an exported sentence encoder it does so for `SentenceTransformer(..., trust_remote_code=True)`.
"""

from importlib import import_module

import transformers

try:
    import collab_heads  # noqa: F401  from now on transformers loads what it changed
except ModuleNotFoundError as error:
    raise ImportError(
        "this model needs collab_heads: install the package collab_heads (its README says how)"
    ) from error


def __getattr__(name: str) -> type:
    """Stand for a class of transformers, which must not be registered as custom code: its models are saved as usual.

    The module of sentence-transformers that runs an exported model is the class itself.
    """
    if name == "ServedTransformer":
        return import_module("collab_heads.serving.served_transformer").ServedTransformer
    model = getattr(transformers, name)
    parts = {part: getattr(model, part) for part in ("from_pretrained", "_from_config", "config_class", "__module__")}
    return type(name, (), {**parts, "register_for_auto_class": staticmethod(lambda auto_class=None: None)})
