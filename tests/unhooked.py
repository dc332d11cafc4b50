"""transformers as it is where nobody has imported the package."""

import inspect

from transformers import PreTrainedModel

from collab_heads.saving.transformers_hooks import HOOKS, OF_MODELS


def take_off_hooks(patch):
    """Restore the functions that the package wraps, for as long as a monkeypatch lasts."""
    for where, name in [*((PreTrainedModel, name) for name in OF_MODELS), *HOOKS]:
        stock = inspect.unwrap(getattr(where, name))
        is_of_class = isinstance(inspect.getattr_static(where, name), classmethod)
        patch.setattr(where, name, classmethod(stock) if is_of_class else stock)
