"""The core of attention with rotary positions: for sites with narrower heads, or with key heads removed.

Keys are cached after the rotation, one per key/value head, as the stock classes cache them: every cache works.

Shapes: B batch, T query tokens, S key tokens, H heads, H_k key/value heads, d width of a query/key head, d_v of a value
head.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from collab_heads.layers.attention import pad_to_one_width
from collab_heads.layers.query_key import split_heads
from collab_heads.layers.removed import NoHeads
from collab_heads.layers.rotary_query_key import Positions, Rotate

Norms = tuple[nn.Module, nn.Module]
# From this number of keys on, a decoding step is faster if narrower values are not padded, which copies the cache: at
# 1,000 keys and a batch of 16 it takes 0.87 instead of 1.24 of the stock time, at 100 keys there is no difference
# (Qwen3, values half as wide, one CPU thread). sdpa is the only fused backend that takes two widths.
LONG = 256


def rotary_attention(
    module: Any,
    value: nn.Module,
    hidden_states: Tensor,
    attention_mask: Any,
    cache: Cache | None,
    *,
    positions: Positions,
    rotate: Rotate,
    norms: Norms | None = None,
    eager: Callable,
    dropout: float,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Attend from tokens to themselves and to those in the cache, with the model's attention backend.

    Args:
        module: a replaced attention module: its `query_key` and, with a cache, its `layer_idx` are used.
        value: the module's value projection.
        hidden_states: [B, T, D].
        attention_mask: in whatever form the backend takes.
        cache: as the stock module takes it.
        positions: cosines and sines [B or 1, T, d].
        rotate: rotates queries [B, H, T, d] and keys [B, H_k, T, d] to these positions.
        norms: of queries and keys, over the width of a head; applied before the rotation.
        eager: the family's own eager attention function.
        dropout: probability, applied in training mode only.
        **kwargs: passed to the backend.

    Returns:
        The concatenated heads [B, T, H * d_v] and, if the backend returns them, the weights [B, H, T, S].
    """
    query_key, implementation = module.query_key, module.config._attn_implementation
    if isinstance(query_key, NoHeads):
        return without_heads(module, value, hidden_states, cache, implementation)
    query = query_key(hidden_states)
    key = query_key.split(query_key.keys(hidden_states).unsqueeze(1))
    if norms is not None:
        query, key = norms[0](query), norms[1](key)
    query, key = query_key.rotate(query, key, positions, rotate)
    values = split_heads(value(hidden_states), query_key.num_key_heads)
    if cache is not None:
        key, values = cache.update(key, values, module.layer_idx)
    dim_value = values.shape[-1]
    if query_key.group_size is None:
        key, values = query_key.for_each_head(key), query_key.for_each_head(values)
    is_long_step = implementation == "sdpa" and query.shape[-2] == 1 and key.shape[-2] >= LONG
    if query.shape[-1] != dim_value and implementation != "eager" and not is_long_step:
        query, key, values = pad_to_one_width(query, key, values, has_one_key=False)
    backend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    output, weights = backend(
        module,
        query,
        key,
        values,
        attention_mask,
        dropout=dropout if module.training else 0.0,
        scaling=query_key.state.scale,
        **kwargs,
    )
    return output[..., :dim_value].flatten(-2), weights


def without_heads(
    module: Any, value: nn.Module, hidden_states: Tensor, cache: Cache | None, implementation: str
) -> tuple[Tensor, Tensor | None]:
    """Return the output of a site without heads; it caches one zero per token, by which a cache counts tokens."""
    key, values = module.query_key.keys(hidden_states).unsqueeze(1), value(hidden_states).unsqueeze(1)
    if cache is not None:
        key, values = cache.update(key, values, module.layer_idx)
    batch, length = hidden_states.shape[:2]
    weights = hidden_states.new_empty(batch, 0, length, key.shape[-2]) if implementation == "eager" else None
    return hidden_states[..., :0], weights  # part of the graph: DDP wants a gradient of the norm before it
