"""Curves (quality by heads kept, the share of the source, error by budget) and distributions of importance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from collab_heads.errors import ArgumentError, NonFiniteError, ShapeError
from collab_heads.heads.comparison import balance
from collab_heads.plots.canvas import LINES, MARKERS, OKABE_ITO, drawn, new_figure
from collab_heads.plots.panels import checked_values
from collab_heads.plots.token_maps import label_tokens
from collab_heads.sites.site import ROLES, AttentionSite

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MOST_TOKENS = 60


@drawn
def quality_curves(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    *,
    original: float | None = None,
    metric: str,
    total: int,
    title: str | None = None,
) -> Figure:
    """Draw quality against heads kept: a line per way to choose them, with its own marker and line style.

    Args:
        curves: name, such as that of a measure of importance -> (heads kept, quality) in any order.
        original: quality of the model with all heads, drawn as a horizontal line.
        metric: the name of the quality, such as "BLEU".
        total: number of heads before any was removed.
        title: a title for the figure.

    Raises:
        ArgumentError: if there is no curve, a curve is empty, or a number of heads is not between 0 and `total`.
        NonFiniteError: if a quality is NaN or infinite.
        MissingPackageError: if matplotlib is not installed.
    """
    from matplotlib.ticker import MaxNLocator

    if not curves:
        raise ArgumentError("there are no curves to show: pass at least one")
    check_points(curves, original, total)
    figure = new_figure(6.2, 3.8, title)
    axes = figure.add_subplot()
    if original is not None:
        axes.axhline(original, color="black", linewidth=1, label=f"all {total} heads")
    for i, (name, points) in enumerate(curves.items()):
        kept, quality = zip(*sorted(points), strict=True)
        colour, marker = OKABE_ITO[i % len(OKABE_ITO)], MARKERS[i % len(MARKERS)]
        # line styles differ between two curves of the same colour and marker
        line = LINES[(i + i // len(OKABE_ITO)) % len(LINES)]
        axes.plot(kept, quality, linestyle=line, color=colour, marker=marker, markersize=5, linewidth=1.4, label=name)
    axes.set(xlabel=f"heads kept of {total}", ylabel=metric)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 4 or max(map(len, curves)) > 30:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    else:
        axes.legend(frameon=True)
    return figure


def check_points(curves: Mapping[str, Sequence[tuple[int, float]]], original: float | None, total: int) -> None:
    if original is not None and not math.isfinite(original):
        raise NonFiniteError(f"the quality of all heads is {original}: pass None if it is not known")
    for name, points in curves.items():
        if not points:
            raise ArgumentError(f"the curve {name!r} has no points")
        for kept, quality in points:
            if not 0 <= kept <= total:
                raise ArgumentError(f"the curve {name!r} has a point at {kept} heads, of {total} in all")
            if not math.isfinite(quality):
                raise NonFiniteError(f"the curve {name!r} is {quality} at {kept} heads: leave the point out")


@drawn
def source_share(
    shares: Tensor | Sequence[float],
    counts: Sequence[int] | None = None,
    *,
    tokens: Sequence[str] | None = None,
    title: str | None = None,
    label: str = "share of the source",
) -> Figure:
    """Draw how much of every generated token comes from the source, or the prompt.

    The rest comes from the target prefix, or the continuation so far.

    Args:
        shares: [T], between 0 and 1, by position of the generated token; means for several sentences.
        counts: [T], the number of sentences that have the position, drawn below; None for one sentence.
        tokens: [T], the generated tokens, for one sentence.
        title: a title for the figure.
        label: the label of the axis.

    Raises:
        ArgumentError: if there are no positions, more than 60 tokens, or a share is not between 0 and 1.
        ShapeError: if the lengths differ.
        NonFiniteError: if a share is NaN or infinite.
        MissingPackageError: if matplotlib is not installed.
    """
    from matplotlib.ticker import MaxNLocator

    values = torch.as_tensor(shares).detach().to("cpu", torch.float64)
    if values.ndim != 1 or any(each is not None and len(each) != len(values) for each in (counts, tokens)):
        sizes = [None if each is None else len(each) for each in (counts, tokens)]
        raise ShapeError(f"shares {tuple(values.shape)}, {sizes[0]} counts and {sizes[1]} tokens do not fit each other")
    if not values.isfinite().all():
        where = int((~values.isfinite()).nonzero()[0])
        raise NonFiniteError(f"the share of position {where + 1} is {float(values[where])}: cut the positions there")
    if not len(values) or values.min() < 0 or values.max() > 1:
        raise ArgumentError(f"shares must be between 0 and 1, of one position at least, not {values.tolist()!s:.80}")
    if tokens is not None and len(tokens) > MOST_TOKENS:
        raise ArgumentError(f"{len(tokens)} tokens cannot be read beside each other: pass {MOST_TOKENS} at most")
    figure = new_figure(max(4.5, 0.2 * len(values) + 1) if tokens else 6.2, 3.6, title)
    rows = figure.subplots(1 + (counts is not None), 1, sharex=True, height_ratios=[3, 1][: 1 + (counts is not None)])
    upper, lower = (rows[0], rows[1]) if counts is not None else (rows, rows)
    places = np.arange(len(values)) + (0 if tokens else 1)
    upper.plot(places, values, color=OKABE_ITO[0], marker="o", markersize=3.5, linewidth=1.4)
    upper.set(ylim=(0, 1), ylabel=label)
    upper.grid(alpha=0.3)
    if counts is not None:
        lower.bar(places, counts, color="#808080", width=0.8)
        lower.set(ylabel="sentences")
        lower.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    if tokens:
        label_tokens(lower, "x", tokens, 8)
    else:
        lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    lower.set(xlabel="generated token" if tokens else "position of the generated token")
    for axes in {upper, lower}:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


@drawn
def budget_curve(
    predicted: Sequence[tuple[float, float]],
    measured: Sequence[tuple[float, float]] = (),
    *,
    of: str,
    title: str | None = None,
) -> Figure:
    """Draw the error of a model's output against the share of its layers that is kept.

    Args:
        predicted: (budget, error), a line.
        measured: (budget, error), points.
        of: what the budget is of.
        title: a title for the figure.

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
    axes.set(xlabel=f"budget: share of the layers' {of}", ylabel="error of the model's output", xlim=(0, 1))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=True)
    return figure


@drawn
def importance_distributions(
    models: Mapping[str, Mapping[str, Tensor | Sequence[float]]],
    sites: Sequence[AttentionSite] | Mapping[str, Sequence[AttentionSite]],
    label: str = "importance",
    *,
    title: str | None = None,
) -> Figure:
    """Draw the importance of heads, sorted: a column per model, a row per role.

    Every bar is a head, coloured by its layer, in units of the mean of its layer. If the heads of each layer are
    equally important, all bars reach the dashed line; steep bars mean an unbalanced model. This depends neither on the
    unit of importance nor on how many heads the layers have left. The number above is `balance`. The black steps in the
    other columns repeat the first model, stretched to the other's number of heads.

    If a value is negative, no mean can be the unit and no balance can be given: the bars are then the values
    themselves.

    Args:
        models: name of the model -> path -> [H].
        sites: the sites of the models; name of the model -> sites if they differ.
        label: the name of the importance.
        title: a title for the figure.

    Raises:
        ArgumentError: if there is no model, a path is unknown, or no site is left.
        ShapeError: if there is not one value per head.
        NonFiniteError: if a value is NaN or infinite.
        MissingPackageError: if matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.colors import Normalize

    if not models:
        raise ArgumentError("there are no models to compare: pass at least one")
    of = {name: sites[name] if isinstance(sites, Mapping) else sites for name in models}
    checked = {name: checked_values(of[name], given, f"{label} in {name}") for name, given in models.items()}
    relative = all(bool((each >= 0).all()) for by_path in checked.values() for each in by_path.values())
    ranked = {name: {role: ranking(of[name], checked[name], role, relative) for role in ROLES} for name in models}
    roles = [role for role in ROLES if any(len(ranked[name][role][0]) for name in models)]
    if not roles:
        raise ArgumentError("there is no importance to show: pass the values of at least one site")
    layers = [int(layer) for by_role in ranked.values() for _, each in by_role.values() for layer in each]
    cmap, norm = matplotlib.colormaps["viridis"], Normalize(min(layers), max(max(layers), min(layers) + 1))
    figure = new_figure(max(3.4, 2.9 * len(models) + 0.5), 2.1 * len(roles) + 0.3, title)
    grid = figure.subplots(len(roles), len(models), sharey="row", squeeze=False)
    for row, role in zip(grid, roles, strict=True):
        first = None
        for axes, name in zip(row, models, strict=True):
            heights, layers_of_heads = ranked[name][role]
            axes.spines[["top", "right"]].set_visible(False)
            if not len(heights):
                axes.set_title(f"{name}, {role}\nno heads")
                continue
            within = [checked[name][site.path] for site in of[name] if site.role == role and site.path in checked[name]]
            axes.set_title(f"{name}, {role}\n{balance_text(within) if relative else 'no balance: negative values'}")
            axes.bar(np.arange(len(heights)) + 0.5, heights, width=1.0, color=cmap(norm(layers_of_heads)), linewidth=0)
            axes.axhline(1.0 if relative else float(heights.mean()), color="#606060", linestyle="--", linewidth=0.9)
            if first is not None:
                edges = np.linspace(0, len(heights), len(first) + 1)
                axes.stairs(first, edges, color="black", linewidth=1.1, baseline=None)
            first = heights if first is None else first
            axes.set_xlim(0, len(heights))
        row[0].set_ylabel("times the mean of its layer" if relative else label)
    for axes in grid[-1]:
        axes.set_xlabel("heads, most important first")
    colours = matplotlib.cm.ScalarMappable(norm, cmap)
    bar = figure.colorbar(
        colours, ax=grid.ravel().tolist(), label=f"layer of the head ({label})", aspect=25 * len(roles), pad=0.02
    )
    every = sorted(set(layers))
    bar.set_ticks(every if len(every) <= 12 else every[:: len(every) // 8])
    bar.minorticks_off()
    figure.legend(handles=legend_of(list(models), relative), loc="outside lower center", ncols=2, frameon=False)
    return figure


def balance_text(layers: Sequence[Tensor]) -> str:
    number = balance(layers)
    return "one head a layer" if number is None else f"balance {number:.2f}"


def legend_of(names: Sequence[str], relative: bool) -> list:
    from matplotlib.lines import Line2D

    text = "all heads alike" if relative else "mean"
    handles = [Line2D([], [], color="#606060", linestyle="--", linewidth=0.9, label=text)]
    if len(names) > 1:
        handles.append(Line2D([], [], color="black", linewidth=1.1, label=f"{names[0]}, for comparison"))
    return handles


def ranking(
    sites: Sequence[AttentionSite], values: Mapping[str, Tensor], role: str, relative: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the importance of the heads of a role, most important first, and their layers; [n] each."""
    shown = [site for site in sites if site.role == role and site.path in values]
    if not shown:
        return np.zeros(0), np.zeros(0)
    own = [values[site.path] for site in shown]
    joined = torch.cat([each / (float(each.mean()) or 1.0) for each in own] if relative else own)
    layers = torch.cat([torch.full((site.num_heads,), site.layer) for site in shown])
    order = joined.argsort(descending=True, stable=True)
    return joined[order].numpy(), layers[order].numpy()
