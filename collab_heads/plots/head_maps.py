"""Heat maps: a number per head, or its roles (layer x head), and a matrix per site (head x head)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from collab_heads.errors import ArgumentError, ShapeError
from collab_heads.plots.canvas import (
    GREY,
    OKABE_ITO,
    bare,
    beyond,
    colour_scale,
    drawn,
    in_rows,
    ink,
    new_figure,
    panel_grid,
    short_numbers,
    thinned,
)
from collab_heads.plots.panels import Heads, Panel, Totals, checked_values, numbers_of, panels_of
from collab_heads.sites.site import ROLES, AttentionSite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch


FEW_CELLS = 600  # of a figure; with more, cells in SVG are pixels of an image, not paths of 200 bytes each
FEW = 12  # columns: with more, cells are too small for text
NONE = "none"
FRAME: dict[str, Any] = {"fill": False, "edgecolor": "#303030", "linewidth": 1.2}  # of heads that share a key head
# kind of role, see analysis/roles/labels.py -> (colour, letter); a head without a role is as pale as the page
KINDS = {
    "positional": (OKABE_ITO[0], "P"),
    "rare tokens": (OKABE_ITO[1], "R"),
    "syntactic": (OKABE_ITO[2], "S"),
    "first token": (OKABE_ITO[3], "F"),
    NONE: ("#f2f2f2", ""),
}


@drawn
def head_map(
    sites: Sequence[AttentionSite],
    values: Mapping[str, Tensor | Sequence[float]],
    *,
    heads: Heads | None = None,
    totals: Totals | None = None,
    label: str,
    title: str | None = None,
    lowest: float | None = None,
    highest: float | None = None,
    marks: Mapping[str, Sequence[str]] | None = None,
) -> Figure:
    """Draw a number per head as colours: a panel per role, a row per layer, a column per head, one scale for all.

    Heads keep their original numbers. Removed heads are hatched, and heads that share a key head are framed. The scale
    diverges about zero if the values have both signs. Numbers are written if no panel has more than 12 columns.

    Args:
        sites: sites of the model; those without values are left out.
        values: path -> [H], one number per present head of the site.
        heads: path -> original numbers of these heads; None if none was removed.
        totals: number of heads that the sites had, one for all or per path; only needed if no site of a role has its
            last head.
        label: the name of the numbers, for the colour bar.
        title: a title for the figure.
        lowest: the lower end of the scale, to compare figures.
        highest: the upper end.
        marks: path -> [H] short texts to write in place of the numbers.

    Raises:
        ArgumentError: if a path is unknown, there is nothing to show, or ends of the scale are in the wrong order.
        ShapeError: if there is not one value, mark or number per head.
        NonFiniteError: if a value is NaN or infinite.
        MissingPackageError: if matplotlib is not installed.
    """
    checked = checked_values(sites, values, label)
    check_marks(checked, marks or {}, "marks")
    panels = panels_of(sites, list(checked), heads, totals)
    grids = [panel.grid(checked) for panel in panels]
    cmap, norm = colour_scale(grids, lowest=lowest, highest=highest)
    figure, all_axes = head_panels(panels, title, texts=[text for texts in (marks or {}).values() for text in texts])
    form = short_numbers(grids)
    written = marks is not None or all(panel.columns <= FEW for panel in panels)
    for axes, panel, grid in zip(all_axes, panels, grids, strict=True):
        mesh = draw_cells(axes, grid, cmap, norm, len(panels))
        for row, column, path, k in panel.cells() if written else ():
            text = (marks[path][k] if path in marks else "") if marks is not None else form.format(checked[path][k])
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=ink(cmap(norm(grid[row, column]))))
    figure.colorbar(mesh, ax=all_axes, label=label, extend=beyond(grids, norm), aspect=25, pad=0.02)
    legend(figure, panels)
    return figure


@drawn
def role_map(
    sites: Sequence[AttentionSite],
    kinds: Mapping[str, Sequence[str | Sequence[str]]],
    *,
    heads: Heads | None = None,
    totals: Totals | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the roles of every head as colours and letters: positional, first token, rare tokens, syntactic, none.

    A head with several roles has a stripe for each; removed heads are hatched.

    Args:
        sites: sites of the model; those without kinds are left out.
        kinds: path -> [H], the role of each head, several roles, or "none" (or an empty name). Names that are not among
            those above get colours of their own.
        heads: as in `head_map`.
        totals: as in `head_map`.
        title: a title for the figure.

    Raises:
        ArgumentError, ShapeError, MissingPackageError: as in `head_map`.
    """
    from matplotlib.patches import Patch, Rectangle

    names_by_path = {path: [names_of(kind) for kind in of_site] for path, of_site in kinds.items()}
    panels = panels_of(sites, list(names_by_path), heads, totals)
    check_marks({row.site.path: row.numbers for panel in panels for row in panel.rows}, names_by_path, "kinds")
    styles = kind_styles([name for of_site in names_by_path.values() for names in of_site for name in names])
    figure, all_axes = head_panels(panels, title)
    for axes, panel in zip(all_axes, panels, strict=True):
        axes.set(xlim=(-0.5, panel.columns - 0.5), ylim=(len(panel.rows) - 0.5, -0.5))
        for row, column, path, k in panel.cells():
            names = names_by_path[path][k]
            for i, name in enumerate(names):
                colour, letter = styles[name]
                left, width = column - 0.5 + i / len(names), 1 / len(names)
                axes.add_patch(Rectangle((left, row - 0.5), width, 1, facecolor=colour, edgecolor="none"))
                middle = left + width / 2
                axes.text(middle, row, letter, ha="center", va="center", fontsize=7, color=ink(colour))
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="white"))
    seen = [name for name in styles if any(name in names for of_site in names_by_path.values() for names in of_site)]
    keys = [(styles[name][0], f"{name} ({styles[name][1]})" if styles[name][1] else name) for name in seen]
    handles = [Patch(facecolor=colour, edgecolor="#808080", linewidth=0.5, label=text) for colour, text in keys]
    legend(figure, panels, handles)
    return figure


def head_panels(panels: Sequence[Panel], title: str | None, texts: Sequence[str] = ()) -> tuple[Figure, list[Axes]]:
    """Return a figure with an empty panel per role: labelled, removed heads hatched, shared key heads framed."""
    from matplotlib.patches import Rectangle

    most = max(panel.columns for panel in panels)
    side = 0.27 if most <= FEW else 0.22 if most <= 24 else 0.16
    cell = max([0.38 if most <= FEW else side, *(0.08 * len(text) + 0.08 for text in texts)])
    widths = [panel.columns * cell + 0.55 for panel in panels]
    heights = [len(panel.rows) * side + 0.65 for panel in panels]
    per_row = in_rows(widths)
    lines = [range(start, min(start + per_row, len(panels))) for start in range(0, len(panels), per_row)]
    width = max(sum(widths[i] for i in line) for line in lines) + 0.9  # the colour bar
    height = sum(max(heights[i] for i in line) for line in lines) + 0.3
    figure = new_figure(max(3.2, width), max(1.6, height), title)
    every = panel_grid(figure, widths, heights, per_row)
    for axes, panel in zip(every, panels, strict=True):
        bare(axes)
        columns = thinned(range(panel.columns), 16)
        axes.set_xticks(columns, [str(column) for column in columns])
        rows = thinned(range(len(panel.rows)), 32)
        axes.set_yticks(rows, [str(panel.rows[row].site.layer) for row in rows])
        axes.set(title=panel.role, xlabel="head", ylabel="layer")
        for row, column in panel.removed():
            hatched = Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=GREY, edgecolor="white", hatch="////")
            hatched.set_gid(f"removed-{row}-{column}")
            axes.add_patch(hatched)
        for row, first, last in panel.groups():
            frame = Rectangle((first - 0.5, row - 0.5), last - first + 1, 1, zorder=3, **FRAME)
            frame.set_gid(f"group-{row}-{first}")
            axes.add_patch(frame)
    return figure, every


def draw_cells(axes: Axes, grid: np.ndarray, cmap, norm, maps: int):
    """Draw the cells of one of several maps, the first row on top; cells without a value stay empty."""
    values = np.ma.masked_invalid(grid)
    if maps * grid.size > FEW_CELLS:
        return axes.imshow(values, cmap=cmap, norm=norm, interpolation="none", aspect="auto")
    edges = [np.arange(size + 1) - 0.5 for size in grid.shape]
    mesh = axes.pcolormesh(edges[1], edges[0], values, cmap=cmap, norm=norm, edgecolors="white", linewidth=0.5)
    axes.set_ylim(len(grid) - 0.5, -0.5)
    return mesh


def legend(figure: Figure, panels: Sequence[Panel], handles: Sequence[Patch] = ()) -> None:
    """Add a legend below the panels, with entries for removed heads and for heads that share keys, if there are any."""
    from matplotlib.patches import Patch

    handles = list(handles)
    if any(panel.removed() for panel in panels):
        handles.append(Patch(facecolor=GREY, edgecolor="#808080", hatch="////", linewidth=0.5, label="removed"))
    if any(panel.groups() for panel in panels):
        handles.append(Patch(**FRAME, label="one key head"))
    if handles:
        entry = 0.5 + 0.07 * max(len(str(handle.get_label())) for handle in handles)  # inches
        columns = min(len(handles), max(1, int(figure.get_figwidth() / entry)))
        figure.set_figheight(figure.get_figheight() + 0.2 * ((len(handles) - 1) // columns))
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)


def names_of(kind: str | Sequence[str]) -> tuple[str, ...]:
    names = (kind,) if isinstance(kind, str) else tuple(kind)
    return tuple(name for name in names if name) or (NONE,)


def kind_styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    styles = dict(KINDS)
    for name in dict.fromkeys(names):
        if name not in styles:
            taken = {colour for colour, _ in styles.values()}
            free = [colour for colour in OKABE_ITO if colour not in taken] or [OKABE_ITO[-1]]
            letters = {letter for _, letter in styles.values()}
            styles[name] = (free[0], next((c.upper() for c in name if c.isalnum() and c.upper() not in letters), "?"))
    return styles


def check_marks(values: Mapping[str, Sized], marks: Mapping[str, Sequence], what: str) -> None:
    for path, of_site in marks.items():
        if path not in values or len(of_site) != len(values[path]):
            count = len(values[path]) if path in values else 0
            raise ShapeError(f"{path}: {len(of_site)} {what}, and {count} heads that are shown")


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
