"""Whether two models can be a changed model and its original."""

from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from collab_heads.errors import ArgumentError
from collab_heads.model.offloading import check_trainable
from collab_heads.model.refusals import check_wrapper
from collab_heads.record import FIELD

# what two configs may differ in: how the models came about, and how they run
MAY_DIFFER = {FIELD, "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
MAY_DIFFER |= {"return_dict", "output_hidden_states", "output_attentions"}


def check_pair(model: PreTrainedModel, original: PreTrainedModel) -> None:
    """Raise an error unless both are plain models of one class and the same sizes.

    Raises:
        UnsupportedModelError: if one is wrapped, or no transformers model, or the weights of `model` are offloaded.
        ArgumentError: if they are one model, or do not fit each other; what differs is named.
    """
    check_wrapper(model)
    check_wrapper(original)
    check_trainable(model, "a distillation")
    if model is original:
        raise ArgumentError("model and original are one object: load the original again, or copy.deepcopy it before")
    if type(model) is not type(original):
        names = f"{type(model).__name__} and the original a {type(original).__name__}"
        raise ArgumentError(f"the model is a {names}: load both with the same class")
    ours, theirs = flat(model.config.to_dict()), flat(original.config.to_dict())
    differing = [name for name in sorted(ours.keys() | theirs) if ours.get(name) != theirs.get(name)]
    if differing:
        pairs = ", ".join(f"{name} {ours.get(name)!r:.60} and {theirs.get(name)!r:.60}" for name in differing[:5])
        raise ArgumentError(f"the configs of model and original differ: {pairs}: only attention may be changed")


def flat(config: Mapping, prefix: str = "") -> dict[str, object]:
    """The entries of a config that matter, those of inner configs under dotted names."""
    found: dict[str, object] = {}
    for name, value in config.items():
        if name in MAY_DIFFER:
            continue
        if isinstance(value, Mapping) and name.endswith("config"):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def check_apart(trained: Mapping[str, nn.Parameter], original: PreTrainedModel) -> None:
    """Raise ArgumentError if training would change the original, since it holds the same tensor."""
    theirs = {parameter.data_ptr() for parameter in original.parameters()}
    for name, parameter in trained.items():
        if parameter.numel() and parameter.data_ptr() in theirs:
            raise ArgumentError(f"model and original share {name}: load the original again, or copy.deepcopy it")
