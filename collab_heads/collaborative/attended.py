"""What heads give for queries, keys and values, in bounded memory: a block of query tokens after the other.

Scores are as large as the square of a text's length, and a gradient needs several tensors of that size. The scores of a
30-second clip of Whisper base fill 72 MB, those of 2,048 tokens of a model with 32 heads 512 MB. Above `SCORES_BYTES`
they are made a block at a time, and again for the gradient.
"""

import math

from torch import Tensor, cat, is_grad_enabled
from torch.utils.checkpoint import checkpoint

from collab_heads.layers.query_key import products

SCORES_BYTES = 32 * 2**20  # of the scores that are held at a time


def attended(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Softmax attention: [B, H, T, w], [B, H or 1, S, w], [B, H, S, d_v] -> [B, H, T, d_v].

    Args:
        query: of every head.
        key: of every head, or one for all.
        value: of every head.
        scale: of the scores.
        bias: added to the scaled scores, broadcasts to [B, H, T, S]; None for nothing.
    """
    whole = query.shape[:-1].numel() * key.shape[-2] * query.element_size()
    if whole <= SCORES_BYTES:
        return block(query, key, value, scale, bias)
    size = max(query.shape[-2] * SCORES_BYTES // whole, 1)
    count = math.ceil(query.shape[-2] / size)
    biases = [bias] * count if bias is None or bias.ndim < 2 or bias.shape[-2] == 1 else bias.split(size, dim=-2)
    found = []
    for rows, of_rows in zip(query.split(size, dim=-2), biases, strict=True):
        if is_grad_enabled():
            found.append(checkpoint(block, rows, key, value, scale, of_rows, use_reentrant=False))
        else:
            found.append(block(rows, key, value, scale, of_rows))
    return cat(found, dim=-2)


def block(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """The same for all query tokens at once."""
    scores = scale * products(query, key)
    if bias is not None:
        scores = scores + bias
    return scores.softmax(-1) @ value
