"""Attention with one key for all heads, on CPUs.

`scaled_dot_product_attention` has no fast CPU path when queries are wider than values, and copies a broadcast key for
every head: in decoding it is up to 60 times slower than this function. Here all heads are rows of one product with the
one key; long queries are processed in blocks whose scores stay in the processor's cache.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
