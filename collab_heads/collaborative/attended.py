"""Compute attention in bounded memory, one block of query tokens after the other.

Scores grow with the square of the length of a text, and a gradient needs several tensors of that size. The scores of a
30-second clip in Whisper base take 72 MB, those of 2,048 tokens in a model with 32 heads 512 MB. Above `SCORES_BYTES`
they are computed one block at a time, and the gradient of a block is computed before the next block. On a processor
blocks are small: they stay in its cache, and what allocators keep of them is small, too.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from collab_heads.layers.query_key import products

SCORES_BYTES = {"cpu": 2 * 2**20}  # of scores that are held at a time, by the type of the device
SCORES_BYTES_ELSEWHERE = 32 * 2**20  # small blocks would leave most of a GPU idle


class Block(NamedTuple):
    """The attention of some query tokens.

    Attributes:
        rows: the query tokens.
        weights: [B, H, t, S], their attention weights.
        heads: [B, H, t, d_v], the outputs of the heads for them.
    """

    rows: slice
    weights: Tensor
    heads: Tensor


def blocks(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None) -> Iterator[Block]:
    """Compute softmax attention one block of query tokens at a time; callers turn gradients off.

    Args:
        query: [B, H, T, w], of every head.
        key: [B, H, S, w], or [B, 1, S, w] if all heads share one.
        value: [B, H, S, d_v], of every head.
        scale: scale of the scores.
        bias: added to the scaled scores, broadcasts to [B, H, T, S]; None for nothing.
    """
    length, whole = query.shape[-2], query.shape[:-1].numel() * key.shape[-2] * query.element_size()
    limit = SCORES_BYTES.get(query.device.type, SCORES_BYTES_ELSEWHERE)
    size = length if whole <= limit else max(length * limit // whole, 1)
    for number in range(math.ceil(length / size)):
        rows = slice(number * size, (number + 1) * size)
        scores = products(query[..., rows, :], key).mul_(scale)
        if bias is not None:
            scores = scores.add_(bias if bias.ndim < 2 or bias.shape[-2] == 1 else bias[..., rows, :])
        weights = scores.softmax(-1)
        yield Block(rows, weights, weights @ value)


@torch.no_grad()
def attended(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Return the output of all heads, [B, H, T, d_v], without a gradient; for the arguments see `blocks`."""
    return torch.cat([block.heads for block in blocks(query, key, value, scale, bias)], dim=-2)


class SquaredGap(torch.autograd.Function):
    """The squared norm, after W_O, of the heads' output minus the target, with gradients for query and key.

    The gradients of a block are computed together with the block, so attention is neither kept nor computed again.
    """

    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        bias: Tensor | None,
        target: Tensor,
        used: Tensor | None,
        gram: Tensor,
    ) -> Tensor:
        """Compute the squared norm: -> [].

        Args:
            ctx: the context of autograd.
            query: see `blocks`.
            key: see `blocks`.
            value: see `blocks`.
            scale: see `blocks`.
            bias: see `blocks`.
            target: [B, T, H * d_v].
            used: [B, T] bool, the query tokens that count; None for all.
            gram: [H * d_v, H * d_v], W_O^T W_O.
        """
        total, (num_heads, key_heads) = query.new_zeros(()), (query.shape[1], key.shape[1])
        wanted = any(ctx.needs_input_grad[:2])
        query_gradient = torch.empty_like(query) if wanted else None
        key_gradient = torch.zeros_like(key, memory_format=torch.contiguous_format) if wanted else None
        for rows, weights, heads in blocks(query, key, value, scale, bias):
            gap = heads.transpose(1, 2).flatten(-2) - target[:, rows]  # (B, t, H * d_v)
            if used is not None:
                gap *= used[:, rows, None]
            product = gap @ gram
            total += torch.dot(gap.flatten(), product.flatten())
            if query_gradient is None or key_gradient is None:
                continue
            of_heads = product.mul_(2 * scale).unflatten(-1, (num_heads, -1)).transpose(1, 2)  # (B, H, t, d_v)
            of_scores = (of_heads @ value.mT).sub_((of_heads * heads).sum(-1, keepdim=True)).mul_(weights)
            some = query[..., rows, :]
            if key_heads == 1 < num_heads:  # all heads are rows of one product with the one key
                shape, of_scores, some = of_scores.shape[1:3], of_scores.flatten(1, 2), some.flatten(1, 2)
                query_gradient[..., rows, :] = (of_scores @ key[:, 0]).unflatten(1, shape)
                key_gradient[:, 0] += of_scores.mT @ some
            else:
                query_gradient[..., rows, :] = of_scores @ key
                key_gradient += of_scores.mT @ some
        ctx.save_for_backward(query_gradient, key_gradient)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor):
        """Return the gradients of query and key; the other arguments have none."""
        return *(gradient * each for each in ctx.saved_tensors), *[None] * 6
