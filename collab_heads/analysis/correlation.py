"""How far two measures rank heads alike."""

from torch import Tensor

from collab_heads.errors import ShapeError


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks.

    Args:
        one: [N].
        other: [N].

    Returns:
        From -1 to 1; 0 where all values of one of them are equal.

    Raises:
        ShapeError: if the two are not of one length.
    """
    if one.shape != other.shape or one.ndim != 1:
        raise ShapeError(f"ranks are compared head by head: {tuple(one.shape)} and {tuple(other.shape)} do not fit")
    first, second = (ranks(values) - (len(values) - 1) / 2 for values in (one, other))
    scale = first.norm() * second.norm()
    return float(first @ second / scale) if scale else 0.0


def ranks(values: Tensor) -> Tensor:
    """The rank of every value from 0, ties at their mean rank: [N], float64."""
    below = (values[None] < values[:, None]).sum(1)
    equal = (values[None] == values[:, None]).sum(1)
    return below.double() + (equal - 1).double() / 2
