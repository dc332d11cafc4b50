"""Put weights on a grid of few bits (`layers.weight_grid`): the nearest points, or GPTQ.

Shapes: D outputs, n inputs, K blocks of inputs.
"""

import math

import torch
from torch import Tensor

from collab_heads.base.numerics import cholesky_, float64, positive_inverse_
from collab_heads.base.option_values import BITS
from collab_heads.errors import ArgumentError, NonFiniteError
from collab_heads.layers.weight_grid import BLOCK, OF_ROWS, GridWeights, codes_of, in_blocks, nearest_codes

SHARES = tuple(1.15 - 0.05 * step for step in range(12))  # of the scale that gives the largest weight the first code
RIDGE = 0.01  # of the mean diagonal of second moments


def nearest_on_grid(weight: Tensor, bits: int) -> GridWeights:
    """Round weights to the nearest points of a grid, whose scales keep the squared error of each block small.

    Args:
        weight: [D, n].
        bits: 3, 4 or 8.

    Raises:
        ArgumentError: on other bits.
        NonFiniteError: if a weight is NaN or inf, or too large for scales in half precision.
    """
    check_grid(weight, bits)
    blocks = in_blocks(weight, bits)  # [D, K, inputs of a block]
    scales = best_scales(blocks, bits)
    codes = nearest_codes(blocks, scales[..., None], bits).flatten(1)[:, : weight.shape[1]]
    return GridWeights(codes.to(torch.int8), scales, bits)


def gptq(weight: Tensor, second: Tensor, bits: int) -> GridWeights:
    """Put weights on a grid so that outputs change little: what rounding one input's weights does, the next make up.

    Args:
        weight: [D, n].
        second: [n, n], the second moments of the inputs (sum or mean of x x^T). Inputs that are always zero may have
            any weight.
        bits: 3, 4 or 8.

    Raises:
        ArgumentError: on other bits, or moments of another size.
        NonFiniteError: if a weight or a moment is NaN or inf, or a weight too large for scales in half precision.

    Source: Frantar, Ashkboos, Hoefler, Alistarh 2023, "GPTQ", arXiv:2210.17323.
    """
    check_grid(weight, bits)
    n = weight.shape[1]
    if second.shape != (n, n):
        raise ArgumentError(f"second: {list(second.shape)} moments for weights {list(weight.shape)}, not [{n}, {n}]")
    if not torch.isfinite(second).all():
        raise NonFiniteError("second: the moments of the inputs contain NaN or inf")
    left, factor = float64(weight).clone(), inverse_factor(second)
    codes, scales = [], []
    if bits == OF_ROWS:
        scales = [best_scales(in_blocks(left, bits), bits)]
    for start in range(0, n, BLOCK):
        block, rows = left[:, start : start + BLOCK], factor[start : start + BLOCK]
        if bits != OF_ROWS:
            scales.append(best_scales(in_blocks(block, bits), bits))
        found = scales[-1]  # [D, 1]
        errors = torch.zeros_like(block)
        for place in range(block.shape[1]):
            column, own = block[:, place, None], rows[place, start:]
            code = nearest_codes(column, found, bits)
            errors[:, place, None] = (column - code * found) / own[place]
            block[:, place + 1 :] -= errors[:, place, None] * own[place + 1 : block.shape[1]]
            codes.append(code.to(torch.int8))
        left[:, start + BLOCK :] -= errors @ rows[:, start + BLOCK :]
    like = weight.device
    return GridWeights(torch.cat(codes, dim=1).to(like), torch.cat(scales, dim=1).to(like), bits)


def check_grid(weight: Tensor, bits: int) -> None:
    if bits not in BITS:
        raise ArgumentError(f"bits={bits!r}: a weight has {', '.join(map(str, BITS[:-1]))} or {BITS[-1]} bits")
    most = torch.finfo(torch.float16).max * 2 ** (bits - 1) / max(SHARES)
    if not (weight.abs() < most).all():
        raise NonFiniteError(f"weight: NaN, inf or a number above {most:.3g}, for which half precision has no scale")


def best_scales(blocks: Tensor, bits: int) -> Tensor:
    """Return the scale of every block that leaves the least squared error among a few: [D, K, n] -> [D, K], float16.

    The largest weight of a block gets the first code, or one next to it; with eight bits the first or the last one, and
    scales are positive.
    """
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    if bits == OF_ROWS:
        extreme = -extreme.abs()
    best, least = torch.zeros_like(extreme, dtype=torch.float16), torch.full_like(extreme, math.inf)
    for share in SHARES if bits != OF_ROWS else [each for each in SHARES if each <= 1]:
        scales = (extreme * (share / codes_of(bits)[0])).half()
        error = (nearest_codes(blocks, scales, bits) * scales - blocks).square().sum(-1, keepdim=True)
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    return best.squeeze(-1)


def inverse_factor(second: Tensor) -> Tensor:
    """Return the upper triangular U with U^T U = (second + ridge)^-1, in float64: [n, n]."""
    regular = float64(second).clone()
    diagonal = regular.diagonal()
    diagonal += RIDGE * diagonal.mean()
    diagonal[diagonal == 0] = 1.0  # no input is ever anything but zero
    return cholesky_(positive_inverse_(regular)).mT
