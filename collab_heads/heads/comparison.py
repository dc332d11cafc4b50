"""Compare heads: how evenly importance is spread over them, and how similarly two measures rank them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from collab_heads.errors import ArgumentError, NonFiniteError, ShapeError


def evenness(values: Tensor | Sequence[float]) -> float:
    """Return one minus the Gini coefficient, corrected for the number of heads.

    It is 1 if all heads have the same value and 0 if one head has everything. On average, two heads picked at random
    differ by 2 (1 - evenness) times the mean. It does not depend on the unit of the values, and models with different
    numbers of heads can be compared. The normalised entropy measures the same, but stays near 1 for any model that is
    not degenerate (0.95 for 48 heads spread evenly between 0 and the largest, where this is 0.67).

    Args:
        values: [n], importance of the heads; 0 or more, in any unit.

    Returns:
        A number between 0 and 1; 1 if all values are equal, all are zero, or there is only one.

    Raises:
        ArgumentError: if there are no values, or one is negative: shares of a total must have one sign.
        NonFiniteError: if one is NaN or infinite.

    Source: Gini 1912; the correction n / (n - 1): Deltas 2003, "The small-sample bias of the Gini coefficient".
    """
    ordered = torch.as_tensor(values, dtype=torch.float64).flatten().sort().values
    number = len(ordered)
    if number == 0:
        raise ArgumentError("the balance of no heads is not defined: pass at least one value")
    if not ordered.isfinite().all():
        raise NonFiniteError("the balance of heads needs finite values; there is NaN or inf among them")
    if ordered[0] < 0:
        raise ArgumentError(f"the balance of heads needs values of 0 or more, not {float(ordered[0]):g}")
    total = float(ordered.sum())
    if number == 1 or total == 0:
        return 1.0
    weights = 2 * torch.arange(1, number + 1, dtype=torch.float64) - number - 1
    return 1 - float(weights @ ordered) / ((number - 1) * total)


def balance(layers: Iterable[Tensor | Sequence[float]]) -> float | None:
    """Return how evenly importance is spread within a layer: the mean `evenness` of the layers with several heads.

    Layers are not pooled: relevance is a share of its layer, so a share among two heads is four times as large as one
    among eight. If layers have lost heads, a pooled number would measure how many heads each layer has left.

    Args:
        layers: [H] per layer, the importance of its heads; 0 or more, in any unit.

    Returns:
        A number between 0 and 1; None if no layer has several heads.

    Raises:
        ArgumentError, NonFiniteError: as `evenness`.
    """
    several = [evenness(values) for values in layers if len(values) > 1]
    return sum(several) / len(several) if several else None


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Return Spearman's rank correlation; equal values share the mean of their ranks.

    Args:
        one: [N].
        other: [N].

    Returns:
        A number from -1 to 1; 0 if all values of one tensor are equal.

    Raises:
        ShapeError: if the two are not vectors of the same length.
    """
    if one.shape != other.shape or one.ndim != 1:
        raise ShapeError(f"ranks are compared head by head: {tuple(one.shape)} and {tuple(other.shape)} do not fit")
    first, second = (ranks(values) - (len(values) - 1) / 2 for values in (one, other))
    scale = first.norm() * second.norm()
    return float(first @ second / scale) if scale else 0.0


def ranks(values: Tensor) -> Tensor:
    """Return the rank of every value from 0, with ties at their mean rank: [N], float64."""
    below = (values[None] < values[:, None]).sum(1)
    equal = (values[None] == values[:, None]).sum(1)
    return below.double() + (equal - 1).double() / 2
