"""Matrices head x head, a panel per site: how similar heads are, and how alphas mix them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from collab_heads.errors import ArgumentError
from collab_heads.plots.canvas import GREY, bare, beyond, colour_scale, drawn, new_figure, panel_grid, thinned
from collab_heads.plots.head_maps import draw_cells
from collab_heads.plots.panels import Heads, checked_values, numbers_of
from collab_heads.sites.site import ROLES, AttentionSite

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE = 1.55  # inches
PER_ROW = 6


@drawn
def matrix_maps(
    sites: Sequence[AttentionSite],
    matrices: Mapping[str, Tensor],
    *,
    heads: Heads | None = None,
    label: str,
    title: str | None = None,
    centre: float | None = None,
    lowest: float | None = None,
    highest: float | None = None,
    diagonal: bool = True,
    axes_labels: tuple[str, str] = ("head", "head"),
) -> Figure:
    """Draw the matrices of sites as small panels with one colour scale, by role and layer.

    Args:
        sites: sites of the model; those without a matrix are left out.
        matrices: path -> [H, H], a row and a column per present head of the site.
        heads: path -> original numbers of these heads; None if none was removed.
        label: the name of the numbers, for the colour bar.
        title: a title for the figure.
        centre: the middle of a diverging scale; None for 0 if the values have both signs.
        lowest: the lower end of the scale, to compare figures.
        highest: the upper end.
        diagonal: whether to show the diagonal; similarities of heads with themselves (1, or distance 0) only stretch
            the scale. A hidden diagonal is grey.
        axes_labels: names of the rows and of the columns.

    Raises:
        ArgumentError: if a path is unknown, there is nothing to show, or ends of the scale are in the wrong order.
        ShapeError: if a matrix has not a row and a column per head.
        NonFiniteError: if a number is NaN or infinite.
        MissingPackageError: if matplotlib is not installed.
    """
    checked = checked_values(sites, matrices, label, dimensions=2)
    by_role = [site for role in ROLES for site in sorted(sites, key=lambda s: s.layer) if site.role == role]
    shown = [site for site in by_role if site.path in checked and site.num_heads]
    if not shown:
        raise ArgumentError("there are no matrices to show: pass that of at least one site with heads")
    grids = [checked[site.path].numpy().copy() for site in shown]
    for grid in () if diagonal else grids:
        np.fill_diagonal(grid, np.nan)
    cmap, norm = colour_scale(grids, lowest=lowest, highest=highest, centre=centre)
    roles = [[site for site in shown if site.role == role] for role in ROLES]
    per_row = min(PER_ROW, max(map(len, roles)))
    places = [place for of_role in roles for place in filled(of_role, per_row)]
    down = len(places) // per_row
    figure = new_figure(max(3.2, per_row * SIDE + 0.9), down * (SIDE + 0.1) + 0.2, title)
    every = panel_grid(figure, [1] * len(places), [1] * len(places), per_row)
    for axes, site in zip(every, places, strict=True):
        if site is None:
            axes.remove()
            continue
        mesh = draw_cells(axes, grids[shown.index(site)], cmap, norm, len(grids))
        numbers = numbers_of(site, heads)
        ticks = thinned(range(len(numbers)), 8)
        axes.set_xticks(ticks, [str(numbers[tick]) for tick in ticks], fontsize=6)
        axes.set_yticks(ticks, [str(numbers[tick]) for tick in ticks], fontsize=6)
        axes.set_title(f"{site.role}, layer {site.layer}", fontsize=8)
        axes.set_aspect("equal")
        axes.set_facecolor("white" if diagonal else GREY)
        bare(axes)
        axes.tick_params(pad=1)
    kept = [axes for axes, site in zip(every, places, strict=True) if site is not None]
    figure.colorbar(mesh, ax=kept, label=label, extend=beyond(grids, norm), aspect=25, pad=0.02)
    figure.supylabel(axes_labels[0], fontsize=8)
    figure.supxlabel(axes_labels[1], fontsize=8)
    return figure


def alpha_maps(
    sites: Sequence[AttentionSite],
    alphas: Mapping[str, Tensor],
    *,
    heads: Heads | None = None,
    title: str | None = None,
) -> Figure:
    """Draw alpha matrices as their difference from the identity, which mixes nothing; white is no difference.

    Args:
        sites: sites of the model; those without alphas are left out.
        alphas: path -> [H, H]; row i makes the new head i.
        heads: as in `matrix_maps`.
        title: a title for the figure.

    Raises:
        ArgumentError, ShapeError, NonFiniteError, MissingPackageError: as `matrix_maps`.
    """
    changes = {path: torch.as_tensor(a).detach().cpu().double() - torch.eye(len(a)) for path, a in alphas.items()}
    return matrix_maps(
        sites,
        changes,
        heads=heads,
        label="alpha - identity",
        title=title,
        centre=0.0,
        axes_labels=("new head", "is made of head"),
    )


def filled(sites: Sequence[AttentionSite], per_row: int) -> list[AttentionSite | None]:
    return [*sites, *[None] * (-len(sites) % per_row)]
