"""Distributions of importance over heads, to compare how balanced models are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from collab_heads.analysis.measures.comparison import balance
from collab_heads.analysis.plots.canvas import drawn, new_figure
from collab_heads.analysis.plots.panels import checked_values
from collab_heads.errors import ArgumentError
from collab_heads.sites.site import ROLES, AttentionSite

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    """Return the balance within layers, for a title."""
    number = balance(layers)
    return "one head a layer" if number is None else f"balance {number:.2f}"


def legend_of(names: Sequence[str], relative: bool) -> list:
    """Return legend entries that explain the lines."""
    from matplotlib.lines import Line2D

    text = "all heads alike" if relative else "mean"
    handles = [Line2D([], [], color="#606060", linestyle="--", linewidth=0.9, label=text)]
    if len(names) > 1:
        handles.append(Line2D([], [], color="black", linewidth=1.1, label=f"{names[0]}, for comparison"))
    return handles


def ranking(
    sites: Sequence[AttentionSite], values: Mapping[str, Tensor], role: str, relative: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the importance of the heads of a role, most important first, and their layers; [n] each.

    Args:
        sites: the sites of the model.
        values: path -> [H].
        role: the role of the heads.
        relative: whether to use units of the mean of the layer.
    """
    shown = [site for site in sites if site.role == role and site.path in values]
    if not shown:
        return np.zeros(0), np.zeros(0)
    own = [values[site.path] for site in shown]
    joined = torch.cat([each / (float(each.mean()) or 1.0) for each in own] if relative else own)
    layers = torch.cat([torch.full((site.num_heads,), site.layer) for site in shown])
    order = joined.argsort(descending=True, stable=True)
    return joined[order].numpy(), layers[order].numpy()
