"""Heads over a training: curves, strips and animations of a `HeadHistory`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from collab_heads.analysis.measures.head_history import ALPHAS, GATES, HeadHistory
from collab_heads.analysis.plots.canvas import (
    SEQUENTIAL,
    colour_scale,
    drawn,
    new_figure,
    our_style,
    panel_grid,
    thinned,
)
from collab_heads.analysis.plots.matrices import draw_matrices
from collab_heads.analysis.plots.over_training import (
    check_animation,
    check_path,
    draw_strip,
    frames_of,
    gif_bytes,
    head_frames,
    shown_of,
)
from collab_heads.analysis.plots.panels import Panel, panels_of
from collab_heads.errors import ArgumentError
from collab_heads.files.atomic import write_file
from collab_heads.sites.site import ROLES, AttentionSite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from PIL.Image import Image


# measure -> the name of the numbers, and the ends of the scale if they are known
LABELS = {
    "confidence": "confidence",
    "output_distance": "distance between outputs",
    "map_distance": "distance between maps",
    "base": "largest weight of a map",
    "wasserstein": "distance from equal weights",
    GATES: "P(gate is open)",
    ALPHAS: "nuclear norm of alpha / heads",
}
ENDS: dict[str, dict[str, float]] = {GATES: {"lowest": 0.0, "highest": 1.0}}
FEW_STEPS = 20  # with fewer, each is marked
MOST_LAYERS = 12  # that a legend names, at most


@drawn
def history_curves(
    history: HeadHistory,
    measure: str,
    *,
    exchanges: Mapping[str, Sequence[int]] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw a measure over the optimizer steps: a thin line per head, a thick one per layer's mean, a panel per role.

    For "alphas" there is a line per layer: the nuclear norm divided by the number of heads. It is 1 for the identity,
    and the growth loss increases it. Vertical lines are dashed where another training begins, and dotted where heads
    were exchanged.

    Args:
        history: the recorded history.
        measure: a measure that was recorded.
        exchanges: role -> the optimizer steps after which its heads were exchanged.
        title: a title for the figure.

    Raises:
        ArgumentError: if the measure was not recorded.
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
    """Draw the lines of a site's heads and of their mean, or of the norm of its alphas; return the last one."""
    import matplotlib

    colour = matplotlib.colormaps[SEQUENTIAL](0.9 * layer / max(1, last))  # the end is too pale for a line
    mean = norms(values) if measure == ALPHAS else values.nanmean(-1).numpy()
    if measure != ALPHAS:
        axes.plot(steps, values.numpy(), color=colour, linewidth=0.5, alpha=0.5)
    marker = "o" if len(steps) < FEW_STEPS else ""
    return axes.plot(steps, mean, color=colour, linewidth=1.8, marker=marker, markersize=3)[0]


def norms(alphas: Tensor) -> np.ndarray:
    """Return nuclear norms over the number of present heads: [moments, H, H] -> [moments]; NaN without heads."""
    found = []
    for alpha in alphas:
        there = alpha.diagonal().isfinite()
        within = alpha[there][:, there]
        found.append(float(torch.linalg.svdvals(within).sum() / len(within)) if len(within) else math.nan)
    return np.array(found)


@drawn
def history_strip(history: HeadHistory, measure: str, *, title: str | None = None) -> Figure:
    """Draw a measure of every head at every recorded step: a row per head, grouped by layer, a panel per role.

    Cells are grey where a head was removed, or there was nothing to measure yet.

    Args:
        history: the recorded history.
        measure: a measure that was recorded, other than "alphas".
        title: a title for the figure.

    Raises:
        ArgumentError: if the measure was not recorded, or is not a number per head.
        MissingPackageError: if matplotlib is not installed.
    """
    where = of_heads(history, measure)
    values = {path: rows[where] for path, rows in history.values[measure].items()}
    scale = colour_scale([each.numpy() for each in values.values()], **ENDS.get(measure, {}))
    steps = [history.moments[i].step for i in where]
    return draw_strip(panels_with(history, measure), steps, values, scale, LABELS.get(measure, measure), title)


def beginnings(history: HeadHistory) -> list[int]:
    """Return the steps at which another training of the run began."""
    pairs = zip(history.moments, history.moments[1:], strict=False)
    return [later.step for earlier, later in pairs if later.stage != earlier.stage]


def recorded(history: HeadHistory, measure: str) -> list[int]:
    """Return the indices of the moments that have a measure.

    Raises:
        ArgumentError: if there are none.
    """
    if not (where := history.where(measure)):
        known = ", ".join(history.values) or "nothing"
        raise ArgumentError(f"this history of heads has no {measure!r} at any step; it has {known}")
    return where


def of_heads(history: HeadHistory, measure: str) -> list[int]:
    """Return the indices of the moments that have a measure; raise ArgumentError if it is a matrix."""
    if measure == ALPHAS:
        raise ArgumentError("alphas are a matrix per site: draw history_curves or history_animation of them")
    return recorded(history, measure)


def panels_with(history: HeadHistory, measure: str) -> list[Panel]:
    """Return the panels of the sites that have a measure, with the heads of the beginning."""
    paths = [path for path in history.heads if path in history.values[measure]]
    return panels_of(history.sites, paths, {path: history.heads[path] for path in paths})


def history_animation(
    history: HeadHistory,
    measure: str,
    path: str | Path,
    *,
    title: str | None = None,
    seconds: float = 8.0,
    frames: int = 40,
    dpi: int = 80,
) -> Path:
    """Write an animated GIF: a map layer x head per step, or for "alphas" their difference from the identity.

    It repeats forever; the last step stays two seconds longer.

    Args:
        history: the recorded history.
        measure: a measure that was recorded.
        path: the path of the file, ".gif"; it replaces an existing one only when complete.
        title: a title for the pictures.
        seconds: the length of the animation, in seconds.
        frames: the largest number of steps to show, the first and the last among them.
        dpi: pixels per inch.

    Returns:
        The path.

    Raises:
        ArgumentError: if the measure was not recorded, `seconds` is not positive, there are fewer than two frames, or
            the path does not end in ".gif".
        MissingPackageError: if matplotlib or Pillow is not installed.
    """
    check_path(path)
    return write_file(path, history_gif(history, measure, title, seconds, frames, dpi))


def history_gif(
    history: HeadHistory, measure: str, title: str | None = None, seconds: float = 8.0, frames: int = 40, dpi: int = 80
) -> bytes:
    """Return the GIF that `history_animation` writes."""
    check_animation(seconds, frames)
    where = recorded(history, measure)
    where = [where[i] for i in shown_of(len(where), frames)]
    width = len(str(history.moments[-1].step))
    clocks = [f"{history.moments[i].stage}, step {history.moments[i].step:>{width}}" for i in where]
    with our_style():
        draw = alpha_pictures if measure == ALPHAS else head_pictures
        pictures = draw(history, measure, where, clocks, title, dpi)
    return gif_bytes(pictures, seconds)


def head_pictures(
    history: HeadHistory, measure: str, where: Sequence[int], clocks: Sequence[str], title: str | None, dpi: int
) -> list[Image]:
    """Draw maps layer x head, one picture per moment."""
    values = [{path: rows[i] for path, rows in history.values[measure].items()} for i in where]
    arrays = [rows.numpy() for rows in history.values[measure].values()]
    scale = colour_scale(arrays, **ENDS.get(measure, {}))
    return head_frames(panels_with(history, measure), values, clocks, scale, LABELS.get(measure, measure), title, dpi)


def alpha_pictures(
    history: HeadHistory, measure: str, where: Sequence[int], clocks: Sequence[str], title: str | None, dpi: int
) -> list[Image]:
    """Draw alphas as their difference from the identity, one picture per moment."""
    sites, heads, changes = [], {}, {}
    for site in sites_with(history, measure):
        rows = history.values[measure][site.path][list(where)]
        there = rows[-1].diagonal().isfinite()
        heads[site.path] = tuple(n for n, is_there in zip(history.heads[site.path], there, strict=True) if is_there)
        changes[site.path] = rows[:, there][:, :, there] - torch.eye(int(there.sum()), dtype=rows.dtype)
        sites.append(dataclasses.replace(site, num_heads=int(there.sum()), groups=None))
    most = max(float(each.nan_to_num().abs().max()) for each in changes.values())
    scale = {"centre": 0.0, "lowest": -most or None, "highest": most or None}
    lasting = {path: each[-1] for path, each in changes.items()}
    labels = ("new head", "is made of head")
    figure, meshes = draw_matrices(sites, lasting, heads, "alpha - identity", title, scale, True, labels)
    texts = [f"{labels[1]}; {clock}" for clock in clocks]
    grids = [[changes[path][i].numpy() for path in meshes] for i in range(len(where))]
    cmap = next(iter(meshes.values())).get_cmap()
    return frames_of(figure, list(meshes.values()), grids, texts, cmap, dpi)


def sites_with(history: HeadHistory, measure: str) -> list[AttentionSite]:
    """Return the sites that have a measure at the last of its moments."""
    last = history.where(measure)[-1]
    rows = history.values[measure]
    return [site for site in history.sites if site.path in rows and rows[site.path][last].isfinite().any()]
