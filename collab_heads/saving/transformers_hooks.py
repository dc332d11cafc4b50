"""Install the hooks into transformers: rebuild and initialise changed models, and give static caches their shapes.

A static cache has a fixed size and is made before the first token, as exports need it. transformers asks the config
for one number of heads and one width. A layer that the config records as changed gets the shapes in which its attention
stores keys and values.
"""

import functools
import inspect
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

import torch
import transformers
from packaging.requirements import Requirement
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache

from collab_heads.contract.registry import known_adapter
from collab_heads.errors import UnsupportedVersionError
from collab_heads.layers.query_key_kinds import build_query_key
from collab_heads.saving.four_bits import leave_wide_kernel
from collab_heads.saving.grids import HOOKS as GRID_HOOKS
from collab_heads.saving.initialize import initialize_changed
from collab_heads.saving.layer_configs import HOOKS as LAYER_HOOKS
from collab_heads.saving.marks import unmark
from collab_heads.saving.rebuild import rebuild
from collab_heads.saving.saving import HOOKS as SAVING_HOOKS
from collab_heads.saving.ties import HOOKS as LOADING_HOOKS
from collab_heads.sites.record import FIELD, CollabConfig
from collab_heads.sites.site import count_key_heads, kept_groups
from collab_heads.sites.state import SiteState

STATES = "collab_states"  # attribute of a static cache: index of a layer -> the state of its self-attention


def note_states(stock: Callable, cache: StaticCache, config: PretrainedConfig, *args, **kwargs) -> None:
    """Make a static cache that knows which layers of its decoder are changed."""
    stock(cache, config, *args, **kwargs)
    adapter, sites = known_adapter(config), CollabConfig.of(config).sites
    if adapter is not None:
        decoding = {path: state for path, state in sites.items() if state.role == "dec-self"}
        found = [(re.fullmatch(pattern, path), state) for path, state in decoding.items() for pattern in adapter.paths]
        setattr(cache, STATES, {int(match[1]): state for match, state in found if match})


def make_early(stock: Callable, cache: Cache, batch_size: int, num_heads, head_dim, dtype, device) -> None:
    """Allocate the tensors of all layers, those of changed layers in their own shapes."""
    for number, state in getattr(cache, STATES, {}).items():
        layer = cache.layers[number]
        if layer.supports_early_init and not layer.is_initialized:
            stored = (each if isinstance(each, int) else each[number] for each in (num_heads, head_dim))
            empty = ((batch_size, heads, 0, width) for heads, width in cached_shapes(state, *stored))
            layer.lazy_initialization(*(torch.zeros(shape, dtype=dtype, device=device) for shape in empty))
    stock(cache, batch_size, num_heads, head_dim, dtype, device)


def cached_shapes(state: SiteState, key_heads: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (heads, width) of the keys and of the values that a site stores per token.

    Args:
        state: the state of the site.
        key_heads: the number of key/value heads of the stock site.
        width: the width of each.
    """
    if not state.heads:
        return (1, 1), (1, 0)  # `layers.removed`
    value_width = width if state.values is None else state.values.dim
    if state.query_key is None:
        groups = tuple(head * key_heads // state.num_heads for head in range(state.num_heads))
        heads = key_heads if state.kept is None else len(kept_groups(groups, state.kept)[0])
        return (heads, width), (heads, value_width)
    query_key = build_query_key(state.query_key, state.heads, 1, 1, device="meta")
    heads, together = query_key.cached_heads, count_key_heads(state.heads, state.query_key.groups)
    return (heads, query_key.cache_width // heads), (heads, together * value_width // heads)


def build(stock: Callable, model: PreTrainedModel) -> None:
    """Finish a model that was just built, in the state that its config records."""
    unmark(model.config)
    rebuild(model)
    stock(model)


def initialize(stock: Callable, model: PreTrainedModel, module: nn.Module, *args, **kwargs) -> None:
    """Initialise a module of a model, also one of ours."""

    def as_stock(target: nn.Module) -> None:
        stock(model, target, *args, **kwargs)

    if getattr(module, "_is_hf_initialized", False) or not initialize_changed(model, module, as_stock):
        as_stock(module)
    if hasattr(model.config, FIELD):
        leave_wide_kernel(module)


# method of all models -> the arguments that it must take, more of which may follow, and the function called instead
OF_MODELS: dict[str, tuple[tuple[str, ...], Callable]] = {
    "post_init": (("self",), build),
    "_initialize_weights": (("self", "module"), initialize),
}
# (where, name of the function) -> (what it must take, the function that is called instead)
HOOKS: dict[tuple[Any, str], tuple[str, Callable]] = {
    **LOADING_HOOKS,
    **SAVING_HOOKS,
    **GRID_HOOKS,
    **LAYER_HOOKS,
    (StaticCache, "__init__"): ("config", note_states),
    (Cache, "early_initialization"): ("num_heads", make_early),
}
WRAPPED = "collab_heads"  # attribute of a function that is wrapped already


def install_hooks(model_class: type[PreTrainedModel] = PreTrainedModel) -> None:
    """Wrap `post_init` and `_initialize_weights` of the class that all models inherit from, and the other hooks, once.

    Raises:
        UnsupportedVersionError: if this version of transformers has no such functions, or calls them otherwise.
    """
    check_wrapped(model_class)
    if missing := missing_functions():
        raise unsupported("; ".join(missing))
    for (where, name), (_, instead) in HOOKS.items():
        wrap(where, name, instead)
    for name, (_, instead) in OF_MODELS.items():
        wrap(model_class, name, instead)


def wrap(where: Any, name: str, instead: Callable) -> None:
    """Call `instead` with a stock function and its arguments in place of it; one that is wrapped already stays."""
    stock, kind = getattr(where, name), type(inspect.getattr_static(where, name))
    if hasattr(stock, WRAPPED):
        return
    if kind is classmethod:  # called with the class, which may be a subclass
        stock = stock.__func__

    @functools.wraps(stock)
    def wrapper(*args, **kwargs):
        return instead(stock, *args, **kwargs)

    setattr(wrapper, WRAPPED, True)
    setattr(where, name, kind(wrapper) if kind in (staticmethod, classmethod) else wrapper)


def missing_functions() -> list[str]:
    """Return messages for the functions that this version of transformers lacks or calls with other arguments."""
    return [
        f"{where.__name__} has no {name}(..., {argument})"
        for (where, name), (argument, _) in HOOKS.items()
        if not callable(found := getattr(where, name, None)) or argument not in inspect.signature(found).parameters
    ]


def check_wrapped(model_class: type) -> None:
    for name, (expected, _) in OF_MODELS.items():
        method = getattr(model_class, name, None)
        if not callable(method):
            raise unsupported(f"{model_class.__name__} has no method {name}")
        arguments = inspect.signature(method).parameters.values()
        needed = [argument.name for argument in arguments if argument.default is argument.empty and is_single(argument)]
        if tuple(needed) != expected:
            raise unsupported(f"{model_class.__name__}.{name} takes ({', '.join(needed)}), not ({', '.join(expected)})")


def is_single(argument: inspect.Parameter) -> bool:
    return argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)


def unsupported(reason: str) -> UnsupportedVersionError:
    return UnsupportedVersionError(
        f"transformers {transformers.__version__} cannot load models that collab_heads has changed: {reason}; "
        f"install {supported_versions()}"
    )


def supported_versions() -> str:
    try:
        wanted = [Requirement(line) for line in requires("collab-heads") or ()]
    except PackageNotFoundError:  # a checkout that is not installed
        wanted = []
    named = [str(each) for each in wanted if each.name == "transformers"]
    return repr(named[0]) if named else "a version that pyproject.toml allows"
