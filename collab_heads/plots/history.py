"""Heads over a training: curves, a strip, and an animation of a `HeadHistory`."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from collab_heads.errors import ArgumentError
from collab_heads.files.atomic import write_file
from collab_heads.heads.history import ALPHAS, GATES, HeadHistory
from collab_heads.plots.canvas import (
    GREY,
    SEQUENTIAL,
    bare,
    colour_scale,
    drawn,
    new_figure,
    our_style,
    panel_grid,
    thinned,
)
from collab_heads.plots.head_maps import FEW_CELLS, draw_cells, head_panels, legend
from collab_heads.plots.panels import Panel, panels_of
from collab_heads.sites.site import ROLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


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
FRAMES = 40  # of an animation, at most
SECONDS, LAST = 8.0, 2.0  # of an animation, and how much longer it shows the last frame
DPI = 80  # of an animation


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
    where = recorded_of_heads(history, measure)
    values = {path: rows[where].numpy() for path, rows in history.values[measure].items()}
    cmap, norm = colour_scale(list(values.values()), **ENDS.get(measure, {}))
    panels, steps = panels_with(history, measure), [history.moments[i].step for i in where]
    heights = [sum(len(row.numbers) for row in panel.rows) for panel in panels]
    row_height = 0.16 if max(heights) <= 24 else 0.12 if max(heights) <= 100 else 0.03
    figure = new_figure(3.3 * len(panels) + 0.9, max(1.8, max(heights) * row_height + 0.9), title)
    every = panel_grid(figure, [1] * len(panels), [1] * len(panels), len(panels))
    for axes, panel in zip(every, panels, strict=True):
        rows = np.concatenate([values[row.site.path].T for row in panel.rows])  # [heads, steps]
        cells = np.ma.masked_invalid(rows)
        as_image = len(steps) * sum(heights) > FEW_CELLS
        edges = np.arange(len(rows) + 1) - 0.5
        mesh = axes.pcolormesh(step_edges(steps), edges, cells, cmap=cmap, norm=norm, rasterized=as_image)
        axes.set(title=panel.role, xlabel="optimizer step", ylim=(len(rows) - 0.5, -0.5), facecolor=GREY)
        label_rows(axes, panel, row_height >= 0.12)
    every[0].set_ylabel("layer and head")
    figure.colorbar(mesh, ax=every, label=LABELS.get(measure, measure), aspect=25, pad=0.02)
    return figure


def label_rows(axes: Axes, panel: Panel, numbered: bool) -> None:
    """Name the layers, and the heads if rows are high enough; draw a white line between layers."""
    starts = np.cumsum([0, *(len(row.numbers) for row in panel.rows)])
    middles = (starts[:-1] + starts[1:] - 1) / 2
    bare(axes)
    axes.tick_params(axis="x", length=3)
    axes.set_yticks(middles, [f"layer {row.site.layer}" for row in panel.rows])
    axes.tick_params(axis="y", which="major", pad=16 if numbered else 2)
    if numbered:
        numbers = [number for row in panel.rows for number in row.numbers]
        axes.set_yticks(np.arange(len(numbers)) + 1e-9, [str(n) for n in numbers], minor=True, fontsize=6)
        axes.tick_params(axis="y", which="minor", pad=1)
    for start in starts[1:-1]:
        axes.axhline(start - 0.5, color="white", linewidth=1.5)


def step_edges(steps: Sequence[int]) -> np.ndarray:
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    halfway = (np.array(steps[:-1]) + np.array(steps[1:])) / 2
    return np.array([2 * steps[0] - halfway[0], *halfway, 2 * steps[-1] - halfway[-1]])


def beginnings(history: HeadHistory) -> list[int]:
    pairs = zip(history.moments, history.moments[1:], strict=False)
    return [later.step for earlier, later in pairs if later.stage != earlier.stage]


def recorded(history: HeadHistory, measure: str) -> list[int]:
    """Return the indices of the moments that have a measure."""
    if not (where := history.where(measure)):
        known = ", ".join(history.values) or "nothing"
        raise ArgumentError(f"this history of heads has no {measure!r} at any step; it has {known}")
    return where


def recorded_of_heads(history: HeadHistory, measure: str) -> list[int]:
    """Return the indices of the moments that have a measure; raise ArgumentError if it is a matrix."""
    if measure == ALPHAS:
        raise ArgumentError("alphas are a matrix per site: draw history_curves of them")
    return recorded(history, measure)


def panels_with(history: HeadHistory, measure: str) -> list[Panel]:
    paths = [path for path in history.heads if path in history.values[measure]]
    return panels_of(history.sites, paths, {path: history.heads[path] for path in paths})


def history_animation(
    history: HeadHistory, path: str | Path, measure: str = GATES, *, title: str | None = None
) -> Path:
    """Write an animated GIF: a map layer x head per recorded step, such as of the heads that close over a training.

    It takes eight seconds, shows 40 steps at most, the first and the last among them, and repeats forever.

    Args:
        history: the recorded history.
        path: the path of the file; it replaces an existing one only when complete.
        measure: a measure that was recorded, other than "alphas"; P(gate is open) by default.
        title: a title for the pictures.

    Returns:
        The path.

    Raises:
        ArgumentError: if the measure was not recorded, or is not a number per head, or the path does not end in ".gif".
        MissingPackageError: if matplotlib is not installed.
    """
    if not str(path).lower().endswith(".gif"):
        raise ArgumentError(f'an animation is a GIF: give it a path that ends in ".gif", not {str(path)!r}')
    return write_file(path, history_gif(history, measure, title))


def history_gif(history: HeadHistory, measure: str, title: str | None = None) -> bytes:
    where = recorded_of_heads(history, measure)
    where = [where[i] for i in sorted({round(i) for i in np.linspace(0, len(where) - 1, FRAMES)})]
    panels, rows = panels_with(history, measure), history.values[measure]
    with our_style():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from PIL import Image  # matplotlib needs it, too

        cmap, norm = colour_scale([each.numpy() for each in rows.values()], **ENDS.get(measure, {}))
        figure, every = head_panels(panels, title)
        figure.set_dpi(DPI)
        grids = [[panel.grid({path: each[i] for path, each in rows.items()}) for panel in panels] for i in where]
        meshes = [draw_cells(axes, grid, cmap, norm, len(panels)) for axes, grid in zip(every, grids[0], strict=True)]
        for axes in every:
            axes.set_facecolor(GREY)  # of heads that are removed on the way
        figure.colorbar(meshes[0], ax=every, label=LABELS.get(measure, measure), aspect=25, pad=0.02)
        legend(figure, panels)
        clocks = [f"{history.moments[i].stage}, step {history.moments[i].step}" for i in where]
        clock = figure.supxlabel(max(clocks, key=len), fontsize=9)
        canvas, pictures = FigureCanvasAgg(figure), []
        canvas.draw()
        figure.set_layout_engine("none")  # nothing may move between frames
        for text, of_moment in zip(clocks, grids, strict=True):
            clock.set_text(text)
            for mesh, grid in zip(meshes, of_moment, strict=True):
                mesh.set_array(np.ma.masked_invalid(grid))
            canvas.draw()
            pictures.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))
    buffer, each = io.BytesIO(), round(1000 * SECONDS / len(pictures))
    durations = [each] * (len(pictures) - 1) + [each + round(1000 * LAST)]
    pictures[0].save(buffer, "GIF", save_all=True, append_images=pictures[1:], duration=durations, loop=0)
    return buffer.getvalue()
