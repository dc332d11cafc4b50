"""Frequency pairs of rotary positions, and the rotation of heads that keep only some of them.

Rotary positions rotate dimensions i and i + d/2 of a head together, by an angle that is the position times the i-th
frequency. Pairs do not interact before the score, which is the sum of their contributions. So a head can do without
some of them.

Shapes: B batch, T tokens, H_k key heads, d width of a head, n pairs that are kept of its d/2.
"""

import torch
from torch import Tensor


def dims_of(pairs: Tensor, dim_head: int) -> Tensor:
    """Return the dimensions of pairs: [..., n] -> [..., 2n], first the first one of each pair, then the second ones."""
    return torch.cat([pairs, pairs + dim_head // 2], dim=-1)


def rows_of(heads: Tensor, pairs: Tensor) -> Tensor:
    """Return the rows of the pairs that heads keep: [H, d, ...], [H, n] -> [H * 2n, ...]."""
    return torch.cat([head[each] for head, each in zip(heads, dims_of(pairs, heads.shape[1]), strict=True)])


def of_pairs(angles: Tensor, pairs: Tensor) -> Tensor:
    """Select cosines or sines of the pairs of every key head: [B, T, d], [H_k, n] -> [B, H_k, T, 2n]."""
    return angles[..., dims_of(pairs, angles.shape[-1])].transpose(1, 2)


def turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [..., T, 2n] to their positions, whose cosines and sines broadcast to them."""
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat([-second, first], dim=-1) * sin).to(heads.dtype)
