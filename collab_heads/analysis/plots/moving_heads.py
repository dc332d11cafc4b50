"""Heads over a training as an animation of what a `HeadHistory` holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from collab_heads.analysis.measures.head_history import ALPHAS, HeadHistory
from collab_heads.analysis.plots.canvas import our_style
from collab_heads.analysis.plots.colours import colour_scale
from collab_heads.analysis.plots.head_history import ENDS, LABELS, panels_with, recorded
from collab_heads.analysis.plots.matrices import draw_matrices
from collab_heads.analysis.plots.over_training import (
    check_animation,
    check_path,
    frames_of,
    gif_bytes,
    head_frames,
    shown_of,
)
from collab_heads.files import write_file
from collab_heads.sites import AttentionSite

if TYPE_CHECKING:
    from PIL.Image import Image


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
    """Write an animated GIF: a map layer x head per step, or of "alphas" their difference from the identity.

    It is repeated for ever; the last step stays for two seconds more.

    Args:
        history: what was recorded.
        measure: one that it has.
        path: of the file, ".gif"; it is replaced when the new one is complete.
        title: above all.
        seconds: how long it takes.
        frames: at most so many steps are shown, the first and the last among them.
        dpi: pixels per inch.

    Returns:
        The path.

    Raises:
        ArgumentError: if nothing was recorded of the measure, `seconds` is not positive, there are fewer than two
            frames, or the path does not end in ".gif".
        MissingPackageError: if matplotlib or Pillow is not installed.
    """
    check_path(path)
    return write_file(path, history_gif(history, measure, title, seconds, frames, dpi))


def history_gif(
    history: HeadHistory, measure: str, title: str | None = None, seconds: float = 8.0, frames: int = 40, dpi: int = 80
) -> bytes:
    """What `history_animation` writes."""
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
    """Maps layer x head, one per moment."""
    values = [{path: rows[i] for path, rows in history.values[measure].items()} for i in where]
    arrays = [rows.numpy() for rows in history.values[measure].values()]
    scale = colour_scale(arrays, **ENDS.get(measure, {}))
    return head_frames(panels_with(history, measure), values, clocks, scale, LABELS.get(measure, measure), title, dpi)


def alpha_pictures(
    history: HeadHistory, measure: str, where: Sequence[int], clocks: Sequence[str], title: str | None, dpi: int
) -> list[Image]:
    """Alpha matrices as their difference from the identity, one picture per moment."""
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
    """The sites that have a measure at the last of its moments."""
    last = history.where(measure)[-1]
    rows = history.values[measure]
    return [site for site in history.sites if site.path in rows and rows[site.path][last].isfinite().any()]
