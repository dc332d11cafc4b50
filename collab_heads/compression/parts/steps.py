"""Helpers of several parts: the error of a changed output projection, and the widths to choose from."""

from torch import Tensor

from collab_heads.collaborative.input_moments import InputMoments
from collab_heads.collaborative.values import variance
from collab_heads.collaborative.widths import HEAD_MULTIPLE

LEVELS = 8  # sizes of a part that are considered, or a few more


def share(missing: Tensor, bias: Tensor, weight: Tensor, held: InputMoments) -> float:
    """Return the mean square of missing @ z - bias, as a share of the variance of weight @ z.

    Args:
        missing: [D, n], what of W_O is lost.
        bias: [D], what W_O's bias gained for it.
        weight: [D, n], W_O.
        held: the moments of z.
    """
    second, mean = held.second(), held.mean()
    lost = variance(missing, second) + float(bias @ bias - 2 * bias @ (missing @ mean))
    whole = variance(weight, second - mean.outer(mean))
    return min(max(lost, 0.0) / whole, 1.0) if whole else 0.0


def narrower(width: int) -> list[int]:
    """Return the smaller widths to consider: multiples of 4, at most about `LEVELS` of them."""
    unit = max(HEAD_MULTIPLE, width // LEVELS // HEAD_MULTIPLE * HEAD_MULTIPLE)
    return list(range(unit, width, unit))
