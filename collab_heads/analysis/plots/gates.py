"""Gates over training: a strip of all steps, and an animation."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from collab_heads.analysis.measures.gate_history import GateHistory
from collab_heads.analysis.plots.canvas import bare, drawn, new_figure, our_style, panel_grid
from collab_heads.analysis.plots.colours import colour_scale
from collab_heads.analysis.plots.head_maps import draw_cells, head_panels, legend
from collab_heads.analysis.plots.panels import Panel, Totals, panels_of
from collab_heads.errors import ArgumentError
from collab_heads.files import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

LABEL = "P(gate is open)"
GREYS = 56  # of the 256 colours of a GIF; the others are those of the scale


@drawn
def gate_strip(history: GateHistory, *, title: str | None = None, label: str = LABEL) -> Figure:
    """How open every gate was: a row per head, grouped by layer, a column per recorded step, a panel per role.

    Args:
        history: at least one step.
        title: above all.
        label: of the colour bar.

    Raises:
        ArgumentError: if nothing was recorded.
        MissingPackageError: if matplotlib is not installed.
    """
    panels = recorded_panels(history, None)
    cmap, norm = colour_scale([], lowest=0.0, highest=1.0)
    most = max(sum(len(row.numbers) for row in panel.rows) for panel in panels)
    row_height = 0.16 if most <= 24 else 0.12 if most <= 100 else 0.03
    figure = new_figure(3.3 * len(panels) + 0.9, max(1.8, most * row_height + 0.9), title)
    every = panel_grid(figure, [1] * len(panels), [1] * len(panels), len(panels))
    for axes, panel in zip(every, panels, strict=True):
        rows = np.concatenate([history.probabilities[row.site.path].numpy().T for row in panel.rows])  # [heads, steps]
        edges = step_edges(history.steps)
        mesh = axes.pcolormesh(
            edges, np.arange(len(rows) + 1) - 0.5, rows, cmap=cmap, norm=norm, rasterized=rows.size > 2000
        )
        axes.set(title=panel.role, xlabel="optimizer step", ylim=(len(rows) - 0.5, -0.5))
        label_rows(axes, panel, row_height >= 0.12)
    every[0].set_ylabel("layer and head")
    figure.colorbar(mesh, ax=every, label=label, aspect=25, pad=0.02)
    return figure


def label_rows(axes: Axes, panel: Panel, numbered: bool) -> None:
    """Name the layers, and the heads where rows are high enough; a white line between layers."""
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
    """Where the columns of steps begin and end: halfway to their neighbours, [n + 1]."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    halfway = (np.array(steps[:-1]) + np.array(steps[1:])) / 2
    return np.array([2 * steps[0] - halfway[0], *halfway, 2 * steps[-1] - halfway[-1]])


def gate_animation(
    history: GateHistory,
    path: str | Path,
    *,
    totals: Totals | None = None,
    title: str | None = None,
    label: str = LABEL,
    seconds: float = 8.0,
    frames: int = 80,
    dpi: int = 80,
) -> Path:
    """Write an animated GIF: a map layer x head per step, repeated for ever; the last step stays for two seconds more.

    Args:
        history: at least one step.
        path: of the file, ".gif"; it is replaced when the new one is complete.
        totals: how many heads the sites had before any was removed, as in `head_map`.
        title: above all.
        label: of the colour bar.
        seconds: how long it takes.
        frames: at most so many steps are shown, the first and the last among them.
        dpi: pixels per inch.

    Returns:
        The path.

    Raises:
        ArgumentError: if nothing was recorded, `seconds` is not positive, there are fewer than two frames, or the path
            does not end in ".gif".
        MissingPackageError: if matplotlib is not installed.
    """
    if not str(path).lower().endswith(".gif"):
        raise ArgumentError(f'an animation is a GIF: give it a path that ends in ".gif", not {str(path)!r}')
    if frames < 2 or not seconds > 0:
        raise ArgumentError(f"an animation needs 2 frames and more than 0 seconds, not {frames} and {seconds}")
    panels = recorded_panels(history, totals)
    shown = sorted({round(i) for i in np.linspace(0, len(history.steps) - 1, min(frames, len(history.steps)))})
    with our_style():
        pictures = draw_frames(history, panels, shown, title, label, dpi)
    each = max(20, round(1000 * seconds / len(shown) / 10) * 10)  # GIF counts hundredths; players slow 10 ms down
    durations = [each] * (len(shown) - 1) + [each + 2000]
    buffer = io.BytesIO()
    options = {"save_all": True, "append_images": pictures[1:], "duration": durations, "loop": 0, "disposal": 1}
    pictures[0].save(buffer, format="GIF", optimize=False, **options)
    return write_file(path, buffer.getvalue())


def draw_frames(
    history: GateHistory, panels: Sequence[Panel], shown: Sequence[int], title: str | None, label: str, dpi: int
) -> list[Image]:
    """One picture per step shown, all with the same colours."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    cmap, norm = colour_scale([], lowest=0.0, highest=1.0)
    figure, every = head_panels(panels, title)
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(dpi)
    last = {path: each[-1] for path, each in history.probabilities.items()}
    meshes = [
        draw_cells(axes, panel.grid(last), cmap, norm, len(panels)) for axes, panel in zip(every, panels, strict=True)
    ]
    figure.colorbar(meshes[0], ax=every, label=label, aspect=25, pad=0.02)
    legend(figure, panels)
    width = len(str(history.steps[-1]))
    clock = figure.supxlabel(f"step {history.steps[-1]}", fontsize=9)
    canvas.draw()
    figure.set_layout_engine("none")  # nothing may move between frames
    scale = [[round(255 * c) for c in cmap(i / (255 - GREYS))[:3]] for i in range(256 - GREYS)]
    palette = Image.new("P", (1, 1))
    palette.putpalette(np.array(scale + [[round(255 * i / (GREYS - 1))] * 3 for i in range(GREYS)], np.uint8).tobytes())
    pictures = []
    for step in shown:
        values = {path: each[step] for path, each in history.probabilities.items()}
        for mesh, panel in zip(meshes, panels, strict=True):
            mesh.set_array(np.ma.masked_invalid(panel.grid(values)))
        clock.set_text(f"step {history.steps[step]:>{width}}")
        canvas.draw()
        picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        pictures.append(picture.quantize(palette=palette, dither=Image.Dither.NONE))
    return pictures


def recorded_panels(history: GateHistory, totals: Totals | None) -> list[Panel]:
    """The panels of a history; ArgumentError if it is empty."""
    if not history.steps:
        raise ArgumentError("this history of gates is empty: record() at least one step")
    heads = {site.path: history.heads.get(site.path, range(site.num_heads)) for site in history.sites}
    return panels_of(history.sites, list(heads), heads if history.heads else None, totals)
