"""Frequency pairs of rotary positions, and how heads that keep only some of them are turned to their positions.

Rotary positions turn dimensions i and i + d/2 of a head together, by an angle that is the position times the i-th
frequency. Pairs do not meet before the score, which is the sum of what each of them gives: a head can do without some.

Shapes: B batch, T tokens, H_k key heads, d width of a head, n pairs that are kept of its d/2.
"""

import torch
from torch import Tensor


def dims_of(pairs: Tensor, dim_head: int) -> Tensor:
    """The dimensions of a head that pairs are: [..., n] -> [..., 2n], first the first of each, then the second."""
    return torch.cat([pairs, pairs + dim_head // 2], dim=-1)


def rows_of(heads: Tensor, pairs: Tensor) -> Tensor:
    """The rows of the pairs that heads keep: [H, d, ...], [H, n] -> [H * 2n, ...]."""
    return torch.cat([head[each] for head, each in zip(heads, dims_of(pairs, heads.shape[1]), strict=True)])


def of_pairs(angles: Tensor, pairs: Tensor) -> Tensor:
    """Cosines or sines of positions for the pairs of every key head: [B, T, d], [H_k, n] -> [B, H_k, T, 2n]."""
    return angles[..., dims_of(pairs, angles.shape[-1])].transpose(1, 2)


def turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [..., T, 2n] at their positions, whose cosines and sines broadcast to them."""
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat([-second, first], dim=-1) * sin).to(heads.dtype)
