"""Put weights on a grid: blocks of 32 along the input, one half-precision scale a block, codes of few bits.

The grid is symmetric: a weight is its code times the scale of its block, codes of b bits run from -2^(b-1) to
2^(b-1) - 1, and scales may be negative. ONNX Runtime (`MatMulNBits`), OpenVINO (compressed constants) and GGUF (Q4_0,
Q5_0, Q8_0) hold such weights as they are. A weight takes b + 1/2 bits.

Shapes: D outputs, n inputs, K blocks.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from collab_heads.base.numerics import cholesky_, float64
from collab_heads.errors import ArgumentError, NonFiniteError

BLOCK = 32
BITS = (3, 4, 8)
SHARES = tuple(1.15 - 0.05 * step for step in range(12))  # of the scale that gives the largest weight the code -2^(b-1)
RIDGE = 0.01  # of the mean diagonal of second moments


@dataclass(frozen=True)
class GridWeights:
    """The weights of a linear map on a grid.

    Attributes:
        codes: [D, n], int8.
        scales: [D, ceil(n / 32)], float16.
        bits: the bits of a code.
    """

    codes: Tensor
    scales: Tensor
    bits: int

    @property
    def num_bytes(self) -> float:
        """The bytes that codes and scales take when they are packed."""
        return self.codes.numel() * self.bits / 8 + self.scales.nbytes

    def weight(self) -> Tensor:
        """Return the weights [D, n] in float32, in which products of codes and scales are exact."""
        return self.codes * self.scales.float().repeat_interleave(BLOCK, dim=1)[:, : self.codes.shape[1]]


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
    blocks = in_blocks(weight)  # [D, K, 32]
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
    for start in range(0, n, BLOCK):
        block, rows = left[:, start : start + BLOCK], factor[start : start + BLOCK]
        found = best_scales(in_blocks(block), bits)  # [D, 1]
        errors = torch.zeros_like(block)
        for place in range(block.shape[1]):
            column, own = block[:, place, None], rows[place, start:]
            code = nearest_codes(column, found, bits)
            errors[:, place, None] = (column - code * found) / own[place]
            block[:, place + 1 :] -= errors[:, place, None] * own[place + 1 : block.shape[1]]
            codes.append(code.to(torch.int8))
        left[:, start + BLOCK :] -= errors @ rows[:, start + BLOCK :]
        scales.append(found)
    like = weight.device
    return GridWeights(torch.cat(codes, dim=1).to(like), torch.cat(scales, dim=1).to(like), bits)


def check_grid(weight: Tensor, bits: int) -> None:
    if bits not in BITS:
        raise ArgumentError(f"bits={bits!r}: a weight has {', '.join(map(str, BITS[:-1]))} or {BITS[-1]} bits")
    most = torch.finfo(torch.float16).max * 2 ** (bits - 1) / max(SHARES)
    if not (weight.abs() < most).all():
        raise NonFiniteError(f"weight: NaN, inf or a number above {most:.3g}, for which half precision has no scale")


def in_blocks(weight: Tensor) -> Tensor:
    """Cut [D, n] into [D, K, 32], with zeros after the last input."""
    missing = -weight.shape[1] % BLOCK
    return torch.nn.functional.pad(weight, (0, missing)).unflatten(1, (-1, BLOCK))


def best_scales(blocks: Tensor, bits: int) -> Tensor:
    """Return the scale of every block that leaves the least squared error among a few: [D, K, 32] -> [D, K], float16.

    The largest weight of a block gets the code -2^(b-1), or one next to it.
    """
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    best, least = torch.zeros_like(extreme, dtype=torch.float16), torch.full_like(extreme, math.inf)
    for share in SHARES:
        scales = (extreme * (-share / 2 ** (bits - 1))).half()
        error = (nearest_codes(blocks, scales, bits) * scales - blocks).square().sum(-1, keepdim=True)
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    return best.squeeze(-1)


def nearest_codes(weight: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return the codes whose products with the scales are nearest to weights; 0 where the scale is 0."""
    least = -(2 ** (bits - 1))
    return (weight / scales).nan_to_num(0.0, 0.0, 0.0).round().clamp(least, -least - 1)


def inverse_factor(second: Tensor) -> Tensor:
    """Return the upper triangular U with U^T U = (second + ridge)^-1, in float64: [n, n]."""
    regular = float64(second).clone()
    diagonal = regular.diagonal()
    diagonal += RIDGE * diagonal.mean()
    diagonal[diagonal == 0] = 1.0  # no input is ever anything but zero
    return cholesky_(torch.cholesky_inverse(cholesky_(regular))).mT
