"""The inputs of a served graph: those that it takes, and those that change nothing; others are refused."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from collab_heads.base.checks import did_you_mean
from collab_heads.errors import ArgumentError


def is_all(number: int) -> Callable[[Any], bool]:
    """Return a test of whether all elements of a tensor are a number."""
    return lambda value: isinstance(value, Tensor) and bool((value == number).all())


def is_flag(*allowed: bool) -> Callable[[Any], bool]:
    """Return a test of whether a value is one of some booleans."""
    return lambda value: isinstance(value, bool) and value in allowed


# input that a graph does not take -> the value without which it computes the same, in words, and whether one is that
ASSUMED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "attention_mask": ("ones", is_all(1)),
    "decoder_attention_mask": ("ones", is_all(1)),
    "token_type_ids": ("zeros", is_all(0)),
    "return_dict": ("True", is_flag(True)),
    "use_cache": ("True or False", is_flag(True, False)),
    "output_attentions": ("False", is_flag(False)),
    "output_hidden_states": ("False", is_flag(False)),
    "logits_to_keep": ("0", lambda value: isinstance(value, int) and value == 0),
}
TOKEN_TYPES = "type_vocab_size"  # of configs: the model has token types, and takes zeros for those that are left out


def has_token_types(config: Any) -> bool:
    """Return True if a model takes zeros for token types that are not given; some read them as more tokens."""
    return hasattr(config, TOKEN_TYPES)


def taken(given: Mapping[str, Any], names: set[str], constants: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the inputs that a graph takes; a mask or token types that are not given have their defaults.

    Args:
        given: name -> input, or None.
        names: of the inputs of the graph.
        constants: the values of those that are fixed in it.
        config: of the model.

    Raises:
        ArgumentError: if an input is missing, or one is given that the graph does not take, unless it changes nothing.
    """
    found = {name: value for name, value in given.items() if value is not None}
    for name in found.keys() - (names - constants.keys()):
        check_changes_nothing(name, found.pop(name), names, constants, config)
    if "input_ids" in found:
        defaults = {"attention_mask": torch.ones_like}
        if has_token_types(config):
            defaults["token_type_ids"] = torch.zeros_like
        for name in defaults.keys() & names:
            found.setdefault(name, defaults[name](found["input_ids"]))
    if missing := sorted(names - found.keys() - constants.keys()):
        raise ArgumentError(f"the graph takes {', '.join(missing)}, too: pass them, or export with other batches")
    return found


def check_changes_nothing(name: str, value: Any, names: set[str], constants: Mapping[str, Any], config: Any) -> None:
    """Raise ArgumentError unless a graph that does not take an input computes what it would with it."""
    if name in constants:
        text, is_assumed = repr(constants[name]), type(value) is type(constants[name]) and value == constants[name]
    else:
        text, test = ASSUMED.get(name, ("", lambda value: False))
        is_assumed = test(value) and (name != "token_type_ids" or has_token_types(config))
    if not is_assumed:
        takes = ", ".join(sorted(names - constants.keys()))
        fixed = f", and has {text} for {name}" if text else did_you_mean(name, names)
        raise ArgumentError(
            f"the graph takes no {name}, but {takes}{fixed}: leave it out, or export with batches that hold it"
        )
