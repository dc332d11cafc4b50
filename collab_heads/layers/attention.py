"""The core of collaborative attention: cache layout and score.

The replacement class of a family keeps the signature of the stock class and calls two functions: `cached_key_value`,
then `attend`; `takes_cache` gives it the cache. The differences between the kinds of query/key projection are in
`query_key`.

Shapes: B batch, T query tokens, S key tokens, H heads, R width of the query/key projection over all heads,
d_v width of a value head, W = R + H rounded up to a multiple of 8.

`scaled_dot_product_attention` has no fast CPU path when queries are wider than values, and copies a broadcast key for
every head: in decoding it is up to 60 times slower than `one_key_attention`. There all heads are rows of one product
with the one key; long queries are processed in blocks whose scores stay in the processor's cache.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from collab_heads.errors import ModelStateError
from collab_heads.layers.query_key import split_heads
from collab_heads.layers.removed import NoHeads

# The name of the cache among the arguments and outputs of a model: `cache` since transformers 5.24.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


def takes_cache(forward: Callable) -> Callable:
    """Decorate the `forward` of an attention module: the cache comes as `cache`, whatever transformers calls it.

    Before transformers 5.24 it is passed as `past_key_values`, and `cache` is a paged cache.

    Raises:
        ModelStateError: by the module, on a paged cache (continuous batching), with the layout of the stock config.
    """

    @functools.wraps(forward)
    def takes_either(self, *args, past_key_values: Cache | None = None, **kwargs):
        if past_key_values is not None:
            kwargs["cache"] = past_key_values
        if not isinstance(kwargs.get("cache"), Cache | None):
            raise ModelStateError(
                "continuous batching (a paged cache) does not know the layout of changed attention; use generate()"
            )
        return forward(self, *args, **kwargs)

    return takes_either


def replacing(
    forward: Callable, *stock: type[nn.Module], prefix: str = "Collaborative", **members: Any
) -> dict[type[nn.Module], type[nn.Module]]:
    """Make a subclass with this `forward` for each of some stock attention classes, which are copies of each other.

    A class has the name of its stock class behind a prefix. It is a global of the module of `forward`, so that models
    pickle. Its `stock` is the stock class, its `home` the module of transformers that holds it, its `eager` the eager
    attention there.

    Args:
        forward: of all classes, with the stock signature.
        stock: the stock classes.
        prefix: of the names.
        members: other members of all classes.

    Returns:
        The stock class -> its subclass.
    """
    namespace = inspect.unwrap(forward).__globals__
    made: dict[type[nn.Module], type[nn.Module]] = {}
    for each in stock:
        name, home = prefix + each.__name__, sys.modules[each.__module__]
        own = {"stock": each, "home": home, "eager": staticmethod(vars(home)["eager_attention_forward"])}
        about = {"__module__": namespace["__name__"], "__doc__": f"`{each.__name__}` as this package replaces it."}
        made[each] = namespace[name] = type(name, (each,), {"forward": forward} | own | about | members)
    return made


def cached_key_value(
    module: Any, value: nn.Module, states: Tensor, cache: Cache | None, *, is_cross: bool
) -> tuple[Tensor, Tensor]:
    """Project keys and values, through the cache if there is one.

    Args:
        module: a replaced attention module: its `query_key` and, with a cache, its `layer_idx` are used.
        value: the module's value projection.
        states: [B, S, D_k], the tokens that are attended to.
        cache: as the stock module takes it.
        is_cross: whether `states` come from an encoder, and are cached once.

    Returns:
        key [B, 1, S', W or R] and value [B, 1, S', H * d_v] over all S' tokens seen: one packed head each, a layout
        that dynamic and static caches both store.
    """
    if cache is None:
        return module.query_key.keys(states).unsqueeze(1), value(states).unsqueeze(1)
    own = cache  # of this kind of attention
    if isinstance(cache, EncoderDecoderCache):
        own = cache.cross_attention_cache if is_cross else cache.self_attention_cache
        if is_cross and cache.is_updated.get(module.layer_idx):
            return own.layers[module.layer_idx].keys, own.layers[module.layer_idx].values
    key, packed = module.query_key.keys(states).unsqueeze(1), value(states).unsqueeze(1)
    key, packed = own.update(key, packed, module.layer_idx)
    if is_cross and isinstance(cache, EncoderDecoderCache):
        cache.is_updated[module.layer_idx] = True
    return key, packed


def attend(
    module: Any,
    hidden_states: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    eager: Callable,
    dropout: float,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Attend from `hidden_states` to packed keys and values, with the model's attention backend.

    Args:
        module: a replaced attention module.
        hidden_states: [B, T, D_q].
        key: [B, 1, S, W or R] from `cached_key_value`.
        value: [B, 1, S, H * d_v].
        attention_mask: in whatever form the backend takes.
        eager: the family's own eager attention function.
        dropout: probability, applied in training mode only.
        **kwargs: passed to the backend (`position_bias`, `is_causal`, ...).

    Returns:
        The concatenated heads [B, T, H * d_v] and, if the backend returns them, the weights [B, H, T, S].

    Raises:
        ModelStateError: if the module's `forward` has left a cache among its other arguments.
    """
    if kwargs.get("cache") is not None:
        raise ModelStateError(f"{type(module).__name__}.forward takes no cache: decorate it with takes_cache")
    query_key, implementation = module.query_key, module.config._attn_implementation
    if isinstance(query_key, NoHeads):
        shape = *hidden_states.shape[:-1], key.shape[-2]  # (B, T, S)
        weights = hidden_states.new_empty(shape[0], 0, *shape[1:]) if implementation == "eager" else None
        return hidden_states[..., :0], weights  # part of the graph: DDP wants a gradient of the norm before it
    query = query_key(hidden_states)
    value = split_heads(value, query_key.num_heads)  # (B, H, S, d_v)
    dim_value = value.shape[-1]
    if query_key.has_one_key and implementation == "sdpa" and query.device.type == "cpu":
        backend: Callable = one_key_attention
    else:
        backend, key = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager), query_key.split(key)
        if query.shape[-1] != dim_value and implementation != "eager":
            query, key, value = pad_to_one_width(query, key, value, has_one_key=query_key.has_one_key)
        if implementation == "flex_attention" and kwargs.get("position_bias") is not None:
            # transformers' score function indexes the bias by batch, also where it is one for all (stock T5 fails)
            kwargs["position_bias"] = kwargs["position_bias"].expand(query.shape[0], -1, -1, -1)
    output, weights = backend(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout if module.training else 0.0,
        scaling=query_key.state.scale,
        **kwargs,
    )
    if output.shape[-1] > dim_value:
        output = output[..., :dim_value]
    return output.flatten(-2), weights


def pad_to_one_width(query: Tensor, key: Tensor, value: Tensor, *, has_one_key: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Pad queries, keys and values to one width, which fused kernels need; zeros do not change the dot product.

    Values that are narrower than the one key of all heads are not padded: that key is as wide as many heads together.
    """
    missing = value.shape[-1] - query.shape[-1]
    if missing > 0:
        return F.pad(query, (0, missing)), F.pad(key, (0, missing)), value
    return query, key, value if has_one_key else F.pad(value, (0, -missing))


BLOCK = 64  # query tokens; larger blocks fall out of a 1-2 MB cache at 512 keys


def one_key_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attend with one key for all heads: a backend with the signature and masks of transformers' sdpa.

    Args:
        module: used for its `is_causal`, where the argument is None.
        query: [B, H, T, W].
        key: [B, 1, S, W].
        value: [B, H, S, d_v].
        attention_mask: [B, 1, T or 1, S], bool or additive, or None.
        dropout: probability.
        scaling: factor of the scores.
        is_causal: used without a mask and for more than one query token, as in transformers' sdpa.
        position_bias: [B or 1, H, T, S], added to the scores.
        **kwargs: ignored, as in transformers' sdpa.

    Returns:
        [B, T, H, d_v], and None for the weights.
    """
    length, total = query.shape[2], key.shape[2]
    is_causal = module.is_causal if is_causal is None else is_causal
    if is_causal and attention_mask is None and length > 1:
        rows = torch.arange(length, device=query.device)[:, None]
        attention_mask = (rows >= torch.arange(total, device=query.device))[None, None]
    blind = None if attention_mask is None else blind_rows(attention_mask, position_bias)
    query, columns = query * scaling, key.squeeze(1).mT  # (B, H, T, W), (B, W, S)

    def attend_rows(start: int, stop: int) -> Tensor:
        rows = query[:, :, start:stop]
        scores = (rows.flatten(1, 2) @ columns).unflatten(1, rows.shape[1:3])  # (B, H, t, S)
        if position_bias is not None:
            scores = scores + position_bias[:, :, start:stop]
        if attention_mask is not None:
            mask = query_rows(attention_mask, start, stop)
            if mask.dtype == torch.bool:
                scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)  # faster than to fill what is masked
            else:
                scores = scores + mask
        if blind is not None:  # the softmax of a row of -inf would be NaN, and so would its gradient
            scores = scores.masked_fill(query_rows(blind, start, stop), 0.0)
        weights = scores.softmax(-1)
        output = (F.dropout(weights, dropout) if dropout else weights) @ value
        return output if blind is None else output.masked_fill(query_rows(blind, start, stop), 0.0)

    if is_traced() or length <= BLOCK:
        output = attend_rows(0, length)
    else:
        blocks = [attend_rows(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]
        output = torch.cat(blocks, dim=2)
    return output.transpose(1, 2).contiguous(), None


def blind_rows(mask: Tensor, position_bias: Tensor | None) -> Tensor | None:
    """Return which query tokens see no key at all: transformers' sdpa returns zeros for them, not a mean of the values.

    With a position bias, a bool mask becomes finite numbers; the softmax of such rows is uniform, and none is blind.

    Args:
        mask: [B, 1, T or 1, S], bool or additive.
        position_bias: [B or 1, H, T, S], or None.

    Returns:
        [B, 1, T or 1, 1], or None if there are none.
    """
    if mask.dtype == torch.bool and position_bias is not None:
        return None
    allowed = mask if mask.dtype == torch.bool else mask > -torch.inf
    seeing = allowed.any(-1, keepdim=True)
    return ~seeing if is_traced() or not seeing.all() else None


def is_traced() -> bool:
    """Return True while a graph is traced, which must not depend on sizes or values."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def query_rows(mask: Tensor, start: int, stop: int) -> Tensor:
    """Return the rows of some query tokens: [B, 1, t or 1, ...]."""
    return mask if mask.shape[2] == 1 else mask[:, :, start:stop]
