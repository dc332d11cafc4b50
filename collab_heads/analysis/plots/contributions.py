"""Pictures of contributions: curves over a sentence, over a training, and a map of one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from collab_heads.analysis.plots.canvas import LINES, MARKERS, OKABE_ITO, bare, colour_scale, drawn, new_figure
from collab_heads.analysis.plots.head_maps import draw_cells
from collab_heads.analysis.plots.text import label_tokens
from collab_heads.analysis.relevance.contribution_curve import NORMAL_95, Curve
from collab_heads.analysis.relevance.contribution_results import PER_TOKEN, Contribution, TokenContributions
from collab_heads.errors import ArgumentError, ShapeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from collab_heads.analysis.relevance.contribution_comparison import ContributionComparison

SHOWN: tuple[Contribution, ...] = (*PER_TOKEN, "influence")
LONGEST = 200  # tokens of a side, in a map
MANY = 40  # tokens of a side: with more, cells and labels are smaller
CELL, SMALL_CELL = 0.19, 0.09  # inches


@drawn
def contribution_curves(
    contributions: Mapping[str, TokenContributions] | TokenContributions,
    *,
    parts: int | None = None,
    title: str | None = None,
) -> Figure:
    """Draw contributions over a sentence in four panels.

    The panels show the share of the source, the entropies of source and target, and the influence of source tokens.
    Lines are means over sentences, one per model or kind of prefixes; bands are 95 % intervals.

    Args:
        contributions: name -> contributions, or those of one model alone.
        parts: number of parts of a sentence, to compare sentences of all lengths; None uses positions, of which only
            long sentences have the late ones.
        title: a title for the figure.

    Raises:
        ArgumentError: if there is nothing to show, or `parts` is below 1.
        MissingPackageError: if matplotlib is not installed.
    """
    alone = isinstance(contributions, TokenContributions)
    named = {"": contributions} if isinstance(contributions, TokenContributions) else dict(contributions)
    if not named:
        raise ArgumentError("there are no contributions to show: pass those of one model at least")
    first = next(iter(named.values()))
    figure = new_figure(8.6, 5.2, title)
    for axes, measure in zip(figure.subplots(2, 2).flat, SHOWN, strict=True):
        for index, (name, each) in enumerate(named.items()):
            draw_curve(axes, each.curve(measure, parts), index, name, parts is not None)
        what = "source token" if measure == "influence" else "generated token"
        axes.set(title=panel_title(measure, first.names), xlabel=place_label(what, first.names, parts))
        axes.set_ylim(bottom=0, top=1 if measure == "source" else None)
        finish(axes)
    if not alone:
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(named)), frameon=False)
    return figure


def draw_curve(axes: Axes, curve: Curve, index: int, name: str, relative: bool) -> None:
    """Draw a line with markers, and a band for its interval where that is known."""
    colour = OKABE_ITO[index % len(OKABE_ITO)]
    line = LINES[(index + index // len(OKABE_ITO)) % len(LINES)]
    at = curve.at.numpy() + (0 if relative else 1)
    low, high = (each.numpy() for each in curve.interval())
    axes.plot(at, curve.mean.numpy(), line, color=colour, marker=MARKERS[index % 8], ms=3, lw=1.3, label=name)
    known = np.isfinite(low)
    axes.fill_between(at[known], low[known], high[known], color=colour, alpha=0.18, linewidth=0)


def panel_title(measure: Contribution, names: tuple[str, str]) -> str:
    """Return the title of a panel, with the names of the model's sides."""
    source, target = names
    return {
        "source": f"share of the {source}",
        "source_entropy": f"entropy of the {source}, nats",
        "target_entropy": f"entropy of the {target}, nats",
        "influence": f"influence of {source} tokens (mean 1)",
    }[measure]


def place_label(what: str, names: tuple[str, str], parts: int | None) -> str:
    """Return the label of the horizontal axis."""
    what = what.replace("source", names[0])
    return f"position of the {what}" + ("" if parts is None else ", from the first (0) to the last (1)")


def finish(axes: Axes) -> None:
    """Apply the looks that all panels share."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


@drawn
def contribution_history(comparison: ContributionComparison, *, title: str | None = None) -> Figure:
    """Draw the means of contributions over a training: a point per checkpoint, a line per kind of prefixes.

    A last panel shows the divergence of every checkpoint from the last one.

    Args:
        comparison: a comparison of checkpoints; the horizontal axis shows the numbers in their names, or else their
            order.
        title: a title for the figure.

    Raises:
        ArgumentError: if there are fewer than two models.
        MissingPackageError: if matplotlib is not installed.
    """
    from matplotlib.ticker import MaxNLocator

    names = comparison.models()
    if len(names) < 2:
        raise ArgumentError(f"a history needs two checkpoints or more; this compares {len(names)}")
    steps, sides = comparison.steps(), comparison.runs[0][1].names
    at = steps or list(range(1, len(names) + 1))
    figure = new_figure(8.6, 5.2, title)
    panels = figure.subplots(2, 2).flat
    kinds = list(dict.fromkeys(run.prefixes for _, run in comparison.runs))
    for axes, measure in zip(panels, PER_TOKEN, strict=False):
        for index, kind in enumerate(kinds):
            means, errors = zip(*comparison.over_models(measure, kind), strict=True)
            bars = NORMAL_95 * torch.tensor(errors).nan_to_num(0.0).numpy()
            style = {"color": OKABE_ITO[index], "marker": MARKERS[index], "linestyle": LINES[index]}
            axes.errorbar(at, means, yerr=bars, markersize=3.5, linewidth=1.3, capsize=2, label=kind, **style)
        axes.set(title=panel_title(measure, sides))
    last = figure.axes[-1]
    far = [comparison.divergence.get(name, np.nan) for name in names]
    last.plot(at, far, color=OKABE_ITO[0], marker="o", markersize=3.5, linewidth=1.3)
    last.set(title="divergence from the last, nats")
    for axes in figure.axes:
        axes.set_xlabel("step" if steps else "checkpoint")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        finish(axes)
    if len(kinds) > 1:
        figure.axes[0].legend(frameon=True)
    return figure


@drawn
def contribution_map(
    source: Tensor,
    target: Tensor,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    said: Sequence[str],
    *,
    names: tuple[str, str] = ("source", "target prefix"),
    title: str | None = None,
) -> Figure:
    """Draw what every token of one sentence contributes to every generated token.

    Every generated token has a row, which sums to one. A long sentence is cut after 200 tokens a side, which the title
    says.

    Args:
        source: [P, S], contributions of the source tokens, see `TokenRelevance.contributions`.
        target: [P, T], those of the target prefix.
        source_tokens: [S].
        target_tokens: [T].
        said: [P], the explained tokens.
        names: the names of the two sides.
        title: a title for the figure.

    Raises:
        ArgumentError: if there is nothing to show.
        ShapeError: if contributions and tokens do not fit each other.
        MissingPackageError: if matplotlib is not installed.
    """
    sizes = (len(said), len(source_tokens), len(target_tokens))
    if tuple(source.shape) != (sizes[0], sizes[1]) or tuple(target.shape) != (sizes[0], sizes[2]):
        raise ShapeError(f"contributions {tuple(source.shape)} and {tuple(target.shape)} for {sizes} tokens")
    if 0 in sizes:
        raise ArgumentError(f"nothing to show of {sizes} generated, {names[0]} and {names[1]} tokens")
    cut = [f"the first {LONGEST} of {size} tokens" for size in sizes if size > LONGEST]
    grids = [each[:LONGEST, :LONGEST].double().numpy() for each in (source, target)]
    columns = [list(tokens)[:LONGEST] for tokens in (source_tokens, target_tokens)]
    cmap, norm = colour_scale(grids, lowest=0.0, highest=max(float(each.max()) for each in grids))
    cell, size = (CELL, 7.0) if max(sizes) <= MANY else (SMALL_CELL, 5.0)
    widths = [max(1.0, len(tokens) * cell) for tokens in columns]
    shown = " \u2013 ".join([*([title] if title else []), *dict.fromkeys(cut)]) or None
    figure = new_figure(sum(widths) + 2.6, max(1.0, len(grids[0]) * cell) + 1.5, shown)
    panels = figure.subplots(1, 2, width_ratios=widths, squeeze=False)[0]
    for axes, grid, tokens, name in zip(panels, grids, columns, names, strict=True):
        mesh = draw_cells(axes, grid, cmap, norm, 2)
        axes.set_title(name, fontsize=8)
        bare(axes)
        axes.set(xticks=[], yticks=[])
        label_tokens(axes, "x", tokens, size)
    label_tokens(panels[0], "y", list(said)[:LONGEST], size)
    panels[0].set_ylabel("generated token")
    figure.colorbar(mesh, ax=list(panels), label="contribution", aspect=25, pad=0.02)
    return figure
