"""Gates over training: a strip of all steps, and an animation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from collab_heads.analysis.measures.gate_history import GateHistory
from collab_heads.analysis.plots.canvas import drawn, our_style
from collab_heads.analysis.plots.colours import colour_scale
from collab_heads.analysis.plots.over_training import (
    check_animation,
    check_path,
    draw_strip,
    gif_bytes,
    head_frames,
    shown_of,
)
from collab_heads.analysis.plots.panels import Panel, Totals, panels_of
from collab_heads.errors import ArgumentError
from collab_heads.files import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABEL = "P(gate is open)"


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
    scale = colour_scale([], lowest=0.0, highest=1.0)
    return draw_strip(recorded_panels(history, None), history.steps, history.probabilities, scale, label, title)


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
        MissingPackageError: if matplotlib or Pillow is not installed.
    """
    check_path(path)
    check_animation(seconds, frames)
    panels = recorded_panels(history, totals)
    shown = shown_of(len(history.steps), frames)
    values = [{path: each[i] for path, each in history.probabilities.items()} for i in shown]
    width = len(str(history.steps[-1]))
    clocks = [f"step {history.steps[i]:>{width}}" for i in shown]
    with our_style():
        scale = colour_scale([], lowest=0.0, highest=1.0)
        pictures = head_frames(panels, values, clocks, scale, label, title, dpi)
    return write_file(path, gif_bytes(pictures, seconds))


def recorded_panels(history: GateHistory, totals: Totals | None) -> list[Panel]:
    """The panels of a history; ArgumentError if it is empty."""
    if not history.steps:
        raise ArgumentError("this history of gates is empty: record() at least one step")
    heads = {site.path: history.heads.get(site.path, range(site.num_heads)) for site in history.sites}
    return panels_of(history.sites, list(heads), heads if history.heads else None, totals)
