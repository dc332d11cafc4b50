"""Heads over a training: curves, strips and animations of what a `HeadHistory` holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from collab_heads.analysis.measures.head_history import ALPHAS, HeadHistory
from collab_heads.analysis.plots.canvas import drawn, new_figure, panel_grid, thinned
from collab_heads.analysis.plots.colours import SEQUENTIAL, colour_scale
from collab_heads.analysis.plots.over_training import (
    draw_strip,
)
from collab_heads.analysis.plots.panels import Panel, panels_of
from collab_heads.errors import ArgumentError
from collab_heads.sites import ROLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# measure -> what the numbers are, and the ends of the scale where they are known
LABELS = {
    "confidence": "confidence",
    "output_distance": "distance between outputs",
    "map_distance": "distance between maps",
    "base": "largest weight of a map",
    "wasserstein": "distance from equal weights",
    "gates": "P(gate is open)",
    ALPHAS: "nuclear norm of alpha / heads",
}
ENDS: dict[str, dict[str, float]] = {"gates": {"lowest": 0.0, "highest": 1.0}}
FEW_STEPS = 20  # with fewer, each is marked
MOST_LAYERS = 12  # that a legend names; of more, every so many


@drawn
def history_curves(
    history: HeadHistory,
    measure: str,
    *,
    exchanges: Mapping[str, Sequence[int]] | None = None,
    title: str | None = None,
) -> Figure:
    """A measure over the optimizer steps: a thin line per head, a thick one for the mean of a layer, a panel per role.

    Of "alphas" a line per layer: the nuclear norm over the number of heads, which is 1 for the identity, and is what
    the growth loss makes grow. Upright lines: dashed where another training begins, dotted where heads changed places.

    Args:
        history: what was recorded.
        measure: one that it has.
        exchanges: role -> the optimizer steps after which its heads changed places.
        title: above all.

    Raises:
        ArgumentError: if nothing was recorded of the measure.
        MissingPackageError: if matplotlib is not installed.
    """
    from matplotlib.ticker import MaxNLocator

    where = recorded(history, measure)
    steps = [history.moments[i].step for i in where]
    values = {path: rows[where] for path, rows in history.values[measure].items()}
    by_role = {role: [site for site in history.sites if site.role == role and site.path in values] for role in ROLES}
    by_role = {role: sorted(sites, key=lambda site: site.layer) for role, sites in by_role.items() if sites}
    figure = new_figure(3.3 * len(by_role) + 0.9, 3.2, title)
    every = panel_grid(figure, [1] * len(by_role), [1] * len(by_role), len(by_role))
    last = max(site.layer for sites in by_role.values() for site in sites)
    lines = {}
    for axes, (role, sites) in zip(every, by_role.items(), strict=True):
        for site in sites:
            lines[site.layer] = draw_site(axes, steps, values[site.path], measure, site.layer, last)
        for step in beginnings(history):
            axes.axvline(step, color="black", linewidth=0.8, linestyle="--")
        for step in (exchanges or {}).get(role, ()):
            axes.axvline(step, color="black", linewidth=0.5, linestyle=":")
        axes.set(title=role, xlabel="optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    every[0].set_ylabel(LABELS.get(measure, measure))
    handles = dict(sorted(lines.items()))
    named = thinned(list(handles), MOST_LAYERS)
    texts = [f"layer {layer}" for layer in named]
    figure.legend([handles[layer] for layer in named], texts, loc="outside right center", frameon=False)
    return figure


def draw_site(axes: Axes, steps: Sequence[int], values: Tensor, measure: str, layer: int, last: int) -> Line2D:
    """The lines of a site: of its heads, and of their mean, which is returned; or, of alphas, of their norm."""
    import matplotlib

    colour = matplotlib.colormaps[SEQUENTIAL](0.9 * layer / max(1, last))  # the end is too pale for a line
    mean = norms(values) if measure == ALPHAS else values.nanmean(-1).numpy()
    if measure != ALPHAS:
        axes.plot(steps, values.numpy(), color=colour, linewidth=0.5, alpha=0.5)
    marker = "o" if len(steps) < FEW_STEPS else ""
    return axes.plot(steps, mean, color=colour, linewidth=1.8, marker=marker, markersize=3)[0]


def norms(alphas: Tensor) -> np.ndarray:
    """Nuclear norms over the number of heads that are there: [moments, H, H] -> [moments]; NaN where there is none."""
    found = []
    for alpha in alphas:
        there = alpha.diagonal().isfinite()
        within = alpha[there][:, there]
        found.append(float(torch.linalg.svdvals(within).sum() / len(within)) if len(within) else math.nan)
    return np.array(found)


@drawn
def history_strip(history: HeadHistory, measure: str, *, title: str | None = None) -> Figure:
    """A measure of every head at every recorded step: a row per head, grouped by layer, a panel per role.

    Grey where a head was removed, or there was nothing to measure yet.

    Args:
        history: what was recorded.
        measure: one that it has, other than "alphas".
        title: above all.

    Raises:
        ArgumentError: if nothing was recorded of the measure, or it is no number per head.
        MissingPackageError: if matplotlib is not installed.
    """
    where = of_heads(history, measure)
    values = {path: rows[where] for path, rows in history.values[measure].items()}
    scale = colour_scale([each.numpy() for each in values.values()], **ENDS.get(measure, {}))
    steps = [history.moments[i].step for i in where]
    return draw_strip(panels_with(history, measure), steps, values, scale, LABELS.get(measure, measure), title)


def beginnings(history: HeadHistory) -> list[int]:
    """The steps at which another training of the run began."""
    pairs = zip(history.moments, history.moments[1:], strict=False)
    return [later.step for earlier, later in pairs if later.stage != earlier.stage]


def recorded(history: HeadHistory, measure: str) -> list[int]:
    """The moments that have a measure.

    Raises:
        ArgumentError: if there are none.
    """
    if not (where := history.where(measure)):
        known = ", ".join(history.values) or "nothing"
        raise ArgumentError(f"this history of heads has no {measure!r} at any step; it has {known}")
    return where


def of_heads(history: HeadHistory, measure: str) -> list[int]:
    """The moments that have a measure which is a number per head; an ArgumentError if it is a matrix."""
    if measure == ALPHAS:
        raise ArgumentError("alphas are a matrix per site: draw history_curves or history_animation of them")
    return recorded(history, measure)


def panels_with(history: HeadHistory, measure: str) -> list[Panel]:
    """The panels of the sites that have a measure, with the heads of the beginning."""
    paths = [path for path in history.heads if path in history.values[measure]]
    return panels_of(history.sites, paths, {path: history.heads[path] for path in paths})
