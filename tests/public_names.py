"""The public names: of the package, of `collab_heads.analysis` and of `collab_heads.training`."""

import inspect
from collections.abc import Callable

import collab_heads
import collab_heads.analysis
import collab_heads.training

MODULES = (collab_heads, collab_heads.analysis, collab_heads.training)
HOMES = {name: module for module in MODULES for name in module.__all__ if name != "adapters"}
PUBLIC = {name: getattr(module, name) for name, module in HOMES.items()}


def functions() -> dict[str, Callable]:
    return {name: each for name, each in PUBLIC.items() if inspect.isfunction(each)}
