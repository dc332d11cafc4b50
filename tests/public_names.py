"""The public names: of the package, of `collab_heads.analysis` and of `collab_heads.training`."""

import functools
import inspect
from collections.abc import Callable

import collab_heads
import collab_heads.analysis
import collab_heads.training

MODULES = (collab_heads, collab_heads.analysis, collab_heads.training)
HOMES = {name: module for module in MODULES for name in module.__all__ if name != "adapters"}


@functools.cache
def objects() -> dict[str, object]:
    """All of them; `HeadTraining` imports transformers' Trainer, so not while tests are collected."""
    return {name: getattr(module, name) for name, module in HOMES.items()}


def functions() -> dict[str, Callable]:
    found = {name: getattr(module, name) for name, module in HOMES.items() if name.islower()}
    return {name: each for name, each in found.items() if inspect.isfunction(each)}
