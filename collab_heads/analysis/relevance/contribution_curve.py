"""Means over sentences of unequal length with their standard errors, and pictures of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from collab_heads.base.checks import check_count
from collab_heads.plots.canvas import LINES, MARKERS, OKABE_ITO, drawn, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NORMAL_95 = 1.959964  # standard errors on either side of a mean
ACROSS, HANDLE = 105, 8  # letters that a legend has room for, and those that a line takes before its name
# measure -> the title of its panel, with the names of the two sides
TITLES = {
    "source": "share of the {0}",
    "source_entropy": "entropy of the {0}, nats",
    "target_entropy": "entropy of the {1}, nats",
    "influence": "influence of {0} tokens (mean 1)",
}


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
    """Average rows of unequal length [p], position by position or by parts of a row."""
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


@drawn
def draw_curves(
    runs: Mapping[str, Mapping[str, Curve]], sides: tuple[str, str], is_relative: bool, title: str | None
) -> Figure:
    """Draw curves in four panels: a line per run, with its 95 % interval as a band."""
    figure = new_figure(8.6, 5.2, title)
    for axes, (measure, text) in zip(figure.subplots(2, 2).flat, TITLES.items(), strict=True):
        for index, (name, curves) in enumerate(runs.items()):
            draw_curve(axes, curves[measure], index, name, is_relative)
        token = f"{sides[0]} token" if measure == "influence" else "generated token"
        ends = ", from the first (0) to the last (1)" if is_relative else ""
        axes.set(title=text.format(*sides), xlabel=f"position of the {token}{ends}")
        axes.set_ylim(bottom=0, top=1 if measure == "source" else None)
        finish(axes)
    if any(runs):
        handles, names = figure.axes[0].get_legend_handles_labels()
        columns = max(1, min(4, len(runs), ACROSS // (max(map(len, names)) + HANDLE)))
        figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def draw_curve(axes: Axes, curve: Curve, index: int, name: str, is_relative: bool) -> None:
    colour = OKABE_ITO[index % len(OKABE_ITO)]
    line = LINES[(index + index // len(OKABE_ITO)) % len(LINES)]
    at = curve.at.numpy() + (0 if is_relative else 1)
    low, high = (each.numpy() for each in curve.interval())
    axes.plot(at, curve.mean.numpy(), line, color=colour, marker=MARKERS[index % 8], ms=3, lw=1.3, label=name)
    known = np.isfinite(low)
    axes.fill_between(at[known], low[known], high[known], color=colour, alpha=0.18, linewidth=0)


@drawn
def draw_history(
    at: Sequence[int] | Sequence[str],
    means: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    divergence: Sequence[float],
    sides: tuple[str, str],
    title: str | None,
) -> Figure:
    """Draw means over a training: a point per checkpoint, a line per kind of prefixes. The last panel has divergences.

    Args:
        at: [N], the steps of the checkpoints, or their names.
        means: measure -> kind of prefixes -> [N] means and their standard errors.
        divergence: [N], from the last checkpoint.
        sides: the names of the source and of the target.
        title: a title for the figure.
    """
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(8.6, 5.2, title)
    *panels, last = figure.subplots(2, 2).flat
    for axes, (measure, kinds) in zip(panels, means.items(), strict=True):
        for index, (kind, found) in enumerate(kinds.items()):
            values, errors = zip(*found, strict=True)
            bars = NORMAL_95 * torch.tensor(errors).nan_to_num(0.0).numpy()
            style = {"color": OKABE_ITO[index], "marker": MARKERS[index], "linestyle": LINES[index]}
            axes.errorbar(at, values, yerr=bars, markersize=3.5, linewidth=1.3, capsize=2, label=kind, **style)
        axes.set(title=TITLES[measure].format(*sides))
        if len(kinds) > 1 and axes is panels[0]:
            axes.legend(frameon=True)
    last.plot(at, divergence, color=OKABE_ITO[0], marker="o", markersize=3.5, linewidth=1.3)
    last.set(title="divergence from the last, nats")
    for axes in figure.axes:
        if not isinstance(at[0], str):
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        finish(axes)
    return figure


def finish(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
