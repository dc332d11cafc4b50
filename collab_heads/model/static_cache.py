"""Caches of a fixed size that are made before the first token, as exports need them, in the shapes of changed layers.

transformers asks the config for one number of heads and one width. A layer that the config records otherwise gets the
shapes in which its attention stores keys and values.
"""

import re
from collections.abc import Callable

import torch
from transformers import PretrainedConfig, StaticCache
from transformers.cache_utils import Cache

from collab_heads.layers.query_key_kinds import build_query_key
from collab_heads.record import CollabConfig
from collab_heads.registry import known_adapter
from collab_heads.sites import count_key_heads, kept_groups
from collab_heads.state import SiteState

STATES = "collab_states"  # attribute of a static cache: number of a layer -> the state of its self-attention


def note_states(stock: Callable, cache: StaticCache, config: PretrainedConfig, *args, **kwargs) -> None:
    """Make a static cache that knows which layers of its decoder are changed."""
    stock(cache, config, *args, **kwargs)
    adapter, sites = known_adapter(config), CollabConfig.of(config).sites
    if adapter is not None:
        decoding = {path: state for path, state in sites.items() if state.role == "dec-self"}
        found = [(re.fullmatch(pattern, path), state) for path, state in decoding.items() for pattern in adapter.paths]
        setattr(cache, STATES, {int(match[1]): state for match, state in found if match})


def make_early(stock: Callable, cache: Cache, batch_size: int, num_heads, head_dim, dtype, device) -> None:
    """Make the tensors of all layers, those of changed ones in their own shapes."""
    for number, state in getattr(cache, STATES, {}).items():
        layer = cache.layers[number]
        if layer.supports_early_init and not layer.is_initialized:
            stored = (each if isinstance(each, int) else each[number] for each in (num_heads, head_dim))
            empty = ((batch_size, heads, 0, width) for heads, width in cached_shapes(state, *stored))
            layer.lazy_initialization(*(torch.zeros(shape, dtype=dtype, device=device) for shape in empty))
    stock(cache, batch_size, num_heads, head_dim, dtype, device)


def cached_shapes(state: SiteState, key_heads: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Heads and width that a site stores of every token: of its keys, and of its values.

    Args:
        state: of the site.
        key_heads: how many key/value heads the stock site has.
        width: of each.
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
