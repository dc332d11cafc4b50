"""Means over sentences of unequal length, and their standard errors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collab_heads.base.checks import check_count

NORMAL_95 = 1.959964  # standard errors on either side of a mean


@dataclass(frozen=True, eq=False)
class Curve:
    """A measure by position, for N positions or parts of a sentence.

    Attributes:
        at: [N], positions from 0; for parts, their middles between 0 and 1.
        mean: [N], over the sentences that have such a position.
        error: [N], the standard error of the mean; NaN for a single sentence.
        counts: [N], the number of these sentences.
    """

    at: Tensor
    mean: Tensor
    error: Tensor
    counts: Tensor

    def interval(self) -> tuple[Tensor, Tensor]:
        """Return the lower and the upper end of the 95 % interval of the mean, [N] each, by the normal distribution.

        It is too narrow for fewer than about ten sentences, and NaN for one.
        """
        return self.mean - NORMAL_95 * self.error, self.mean + NORMAL_95 * self.error

    def to_dict(self) -> dict[str, list]:
        """Return all numbers, ready for JSON; an unknown error is None."""
        numbers = {name: getattr(self, name).tolist() for name in ("at", "mean", "counts")}
        return numbers | {"error": [None if math.isnan(each) else each for each in self.error.tolist()]}


def mean_curve(rows: Sequence[Tensor], parts: int | None = None) -> Curve:
    """Average rows of unequal length [p], position by position or by parts of a row.

    Args:
        rows: the numbers of every sentence.
        parts: number of parts of a row; None averages by position. A row with fewer numbers has none in some of the
            parts.

    Raises:
        ArgumentError: if `parts` is below 1.
    """
    if parts is not None:
        check_count("parts", parts, least=1)
        rows = [by_part(row, parts) for row in rows]
    width = parts or max((len(row) for row in rows), default=0)
    filled = torch.full((len(rows), width), torch.nan, dtype=torch.float64)
    for index, row in enumerate(rows):
        filled[index, : len(row)] = row
    there = ~filled.isnan()
    counts = there.sum(0)
    mean = filled.nansum(0) / counts
    squares = (filled - mean).square().nansum(0)
    error = (squares / (counts - 1) / counts).sqrt()  # 0 / 0, and so NaN, for a single one
    at = torch.arange(width, dtype=torch.float64)
    if parts is not None:
        at, there = (at + 0.5) / parts, counts > 0  # a part that no sentence reaches has no mean
        at, mean, error, counts = at[there], mean[there], error[there], counts[there]
    return Curve(at, mean, error, counts)


def by_part(row: Tensor, parts: int) -> Tensor:
    """Return the mean of a row [p] in each of its parts, NaN for a part without a position: [parts]."""
    places = ((torch.arange(len(row)) + 0.5) / max(len(row), 1) * parts).long()
    sums = torch.zeros(parts, dtype=torch.float64).index_add(0, places, row)
    return sums / torch.bincount(places, minlength=parts)


def mean_and_error(rows: Sequence[Tensor]) -> tuple[float, float]:
    """Return the mean of all numbers in rows [p], and its standard error.

    The rows are random draws; the numbers within a row are not.
    """
    numbers = torch.cat([*rows, torch.zeros(0, dtype=torch.float64)])
    return float(numbers.mean()), spread(deviations(rows))


def difference_and_error(rows: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[float, float]:
    """Return the same for the difference of two means over the same sentences in the same order."""
    means = [float(torch.cat([*each]).mean()) for each in (rows, others)]
    return means[0] - means[1], spread(deviations(rows) - deviations(others))


def deviations(rows: Sequence[Tensor]) -> Tensor:
    """Return how far each row moves the mean of all numbers: [n], summing to 0."""
    sums = torch.stack([row.sum() for row in rows])
    sizes = torch.tensor([len(row) for row in rows], dtype=torch.float64)
    return (sums - sums.sum() / sizes.sum() * sizes) / sizes.sum()


def spread(moves: Tensor) -> float:
    """Return the standard error of a mean, from how far each row moves it; NaN for a single row."""
    count = len(moves)
    return math.sqrt(float(moves.square().sum()) * count / (count - 1)) if count > 1 else math.nan
