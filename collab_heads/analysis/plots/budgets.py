"""What a budget costs in quality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from collab_heads.analysis.plots.canvas import drawn, new_figure
from collab_heads.analysis.plots.colours import OKABE_ITO
from collab_heads.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@drawn
def budget_curve(
    predicted: Sequence[tuple[float, float]],
    measured: Sequence[tuple[float, float]] = (),
    *,
    of: str,
    title: str | None = None,
) -> Figure:
    """The error of a model's output against the share of its attention that is left.

    Args:
        predicted: (budget, error), a line.
        measured: (budget, error), points.
        of: what the budget is of.
        title: above.

    Raises:
        ArgumentError: if the line has no points.
        MissingPackageError: if matplotlib is not installed.
    """
    if not predicted:
        raise ArgumentError("the curve has no points")
    figure = new_figure(6.2, 3.8, title)
    axes = figure.add_subplot()
    axes.plot(*zip(*predicted, strict=True), color=OKABE_ITO[0], linewidth=1.4, label="predicted")
    if measured:
        colour = OKABE_ITO[1]
        axes.plot(*zip(*measured, strict=True), color=colour, marker="o", markersize=5, linestyle="", label="measured")
    axes.set(xlabel=f"budget: share of attention's {of}", ylabel="error of the model's output", xlim=(0, 1))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=True)
    return figure
