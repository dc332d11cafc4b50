"""Numbers of heads over a training: a strip of all steps, and animations."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from collab_heads.analysis.plots.canvas import GREY, bare, new_figure, panel_grid
from collab_heads.analysis.plots.head_maps import FEW_CELLS, draw_cells, head_panels, legend
from collab_heads.analysis.plots.panels import Panel
from collab_heads.base.extras import check_extra
from collab_heads.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure
    from PIL.Image import Image

Scale = tuple["Colormap", "Normalize"]
GREYS = 56  # of the 256 colours of a GIF; the others are those of the scale


def draw_strip(
    panels: Sequence[Panel],
    steps: Sequence[int],
    values: Mapping[str, Tensor],
    scale: Scale,
    label: str,
    title: str | None,
) -> Figure:
    """Draw a row per head, grouped by layer, a column per step, a panel per role; `values` is path -> [steps, H]."""
    cmap, norm = scale
    most = max(sum(len(row.numbers) for row in panel.rows) for panel in panels)
    cells = len(steps) * sum(len(row.numbers) for panel in panels for row in panel.rows)
    row_height = 0.16 if most <= 24 else 0.12 if most <= 100 else 0.03
    figure = new_figure(3.3 * len(panels) + 0.9, max(1.8, most * row_height + 0.9), title)
    every = panel_grid(figure, [1] * len(panels), [1] * len(panels), len(panels))
    for axes, panel in zip(every, panels, strict=True):
        rows = np.concatenate([values[row.site.path].numpy().T for row in panel.rows])  # [heads, steps]
        edges = step_edges(steps)
        mesh = axes.pcolormesh(
            edges,
            np.arange(len(rows) + 1) - 0.5,
            np.ma.masked_invalid(rows),
            cmap=cmap,
            norm=norm,
            rasterized=cells > FEW_CELLS,
        )
        axes.set(title=panel.role, xlabel="optimizer step", ylim=(len(rows) - 0.5, -0.5), facecolor=GREY)
        label_rows(axes, panel, row_height >= 0.12)
    every[0].set_ylabel("layer and head")
    figure.colorbar(mesh, ax=every, label=label, aspect=25, pad=0.02)
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
    """Return the edges of the columns of steps, halfway to their neighbours: [n + 1]."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    halfway = (np.array(steps[:-1]) + np.array(steps[1:])) / 2
    return np.array([2 * steps[0] - halfway[0], *halfway, 2 * steps[-1] - halfway[-1]])


def check_pillow() -> None:
    """Check, before long work, that animations can be written.

    Raises:
        MissingPackageError: if Pillow is not installed.
    """
    check_extra("train", "animations", ["pillow"])


def check_path(path: str | Path) -> None:
    """Raise ArgumentError unless the path ends in ".gif"."""
    if not str(path).lower().endswith(".gif"):
        raise ArgumentError(f'an animation is a GIF: give it a path that ends in ".gif", not {str(path)!r}')


def check_animation(seconds: float, frames: int) -> None:
    """Check, before anything is drawn, that an animation is possible.

    Raises:
        ArgumentError: if there are too few seconds or frames.
        MissingPackageError: if Pillow, which writes GIFs, is not installed.
    """
    if frames < 2 or not seconds > 0:
        raise ArgumentError(f"an animation needs 2 frames and more than 0 seconds, not {frames} and {seconds}")
    check_pillow()


def shown_of(count: int, frames: int) -> list[int]:
    """Return which of `count` steps become frames, at most `frames`, the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(frames, count))})


def head_frames(
    panels: Sequence[Panel],
    values: Sequence[Mapping[str, Tensor]],
    clocks: Sequence[str],
    scale: Scale,
    label: str,
    title: str | None,
    dpi: int,
) -> list[Image]:
    """Draw maps layer x head: a picture per moment, from its path -> [H] and the text of its clock."""
    figure, every = head_panels(panels, title)
    meshes = [
        draw_cells(axes, panel.grid(values[-1]), *scale, len(panels)) for axes, panel in zip(every, panels, strict=True)
    ]
    for axes in every:
        axes.set_facecolor(GREY)  # of heads that are removed on the way
    figure.colorbar(meshes[0], ax=every, label=label, aspect=25, pad=0.02)
    legend(figure, panels)
    grids = [[panel.grid(of_moment) for panel in panels] for of_moment in values]
    return frames_of(figure, meshes, grids, clocks, scale[0], dpi)


def frames_of(
    figure: Figure,
    meshes: Sequence[Any],
    grids: Iterable[Sequence[np.ndarray]],
    clocks: Sequence[str],
    cmap: Callable[[float], Sequence[float]],
    dpi: int,
) -> list[Image]:
    """Draw one picture per moment, all with the same colours: only the cells and the clock change."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(dpi)
    clock = figure.supxlabel(max(clocks, key=len), fontsize=9)
    canvas.draw()
    figure.set_layout_engine("none")  # nothing may move between frames
    scale = [[round(255 * c) for c in cmap(i / (255 - GREYS))[:3]] for i in range(256 - GREYS)]
    palette = Image.new("P", (1, 1))
    palette.putpalette(np.array(scale + [[round(255 * i / (GREYS - 1))] * 3 for i in range(GREYS)], np.uint8).tobytes())
    pictures = []
    for of_moment, text in zip(grids, clocks, strict=True):
        for mesh, grid in zip(meshes, of_moment, strict=True):
            mesh.set_array(np.ma.masked_invalid(grid))
        clock.set_text(text)
        canvas.draw()
        picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        pictures.append(picture.quantize(palette=palette, dither=Image.Dither.NONE))
    return pictures


def gif_bytes(pictures: Sequence[Image], seconds: float) -> bytes:
    """Return a GIF of the pictures that repeats forever; the last one stays two seconds longer."""
    each = max(20, round(1000 * seconds / len(pictures) / 10) * 10)  # GIF counts hundredths; players slow 10 ms down
    durations = [each] * (len(pictures) - 1) + [each + 2000]
    buffer = io.BytesIO()
    options: dict[str, Any] = {"append_images": pictures[1:], "duration": durations, "loop": 0, "disposal": 1}
    pictures[0].save(buffer, format="GIF", save_all=True, optimize=False, **options)
    return buffer.getvalue()
