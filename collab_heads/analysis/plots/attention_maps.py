"""Attention maps of the heads of a site for one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from collab_heads.analysis.plots.canvas import MAX_WIDTH, bare, colour_scale, drawn, new_figure, panel_grid
from collab_heads.analysis.plots.head_maps import draw_cells
from collab_heads.analysis.plots.text import label_tokens, token_text
from collab_heads.errors import ArgumentError, NonFiniteError, ShapeError
from collab_heads.sites.site import AttentionSite

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MANY = 24  # tokens: more are written smaller
LETTER = 0.065  # inches of a letter in the labels


@drawn
def attention_map(
    weights: Tensor,
    query_tokens: Sequence[str],
    key_tokens: Sequence[str],
    *,
    heads: Sequence[int] | None = None,
    site: AttentionSite | None = None,
    title: str | None = None,
    longest: int = 40,
) -> Figure:
    """Draw the attention weights of all heads of a site for one sentence: a panel per head, tokens beside the cells.

    Rows are tokens that attend (queries), columns tokens attended to (keys). Longer sentences are cut after `longest`
    tokens, which the title says. The weights of the cut tokens are not shown, so rows may sum to less than 1.

    Args:
        weights: [H, T, S].
        query_tokens: [T].
        key_tokens: [S].
        heads: [H], original numbers of the heads; from 0 if None.
        site: gives the title role and layer.
        title: a title for the figure, after role and layer.
        longest: the largest number of tokens to show.

    Raises:
        ArgumentError: if a dimension is empty or `longest` is below 1.
        ShapeError: if weights, tokens and heads do not fit each other.
        NonFiniteError: if a weight is NaN or infinite.
        MissingPackageError: if matplotlib is not installed.
    """
    maps = torch.as_tensor(weights).detach().to("cpu", torch.float64)
    numbers = list(heads) if heads is not None else list(range(len(maps)))
    expected = (len(numbers), len(query_tokens), len(key_tokens))
    if tuple(maps.shape) != expected:
        raise ShapeError(f"attention weights {tuple(maps.shape)}; heads, query and key tokens make {expected}")
    if 0 in expected or longest < 1:
        raise ArgumentError(f"nothing to show of heads, query and key tokens {expected}, at most {longest} tokens")
    if not maps.isfinite().all():
        head = int((~maps.isfinite()).nonzero()[0][0])
        raise NonFiniteError(f"attention weights of head {numbers[head]} are NaN or infinite: is the sentence padding?")
    cut = [
        f"the first {longest} of {n} {what} tokens" for n, what in zip(expected[1:], SIDES, strict=True) if n > longest
    ]
    grids = [each[:longest, :longest].numpy() for each in maps]
    queries, keys = query_tokens[:longest], key_tokens[:longest]
    cmap, norm = colour_scale(grids, lowest=0.0, highest=max(float(maps.max()), 1e-6))
    cell = 0.17 if len(numbers) <= 2 else 0.125 if len(keys) <= MANY else 0.1
    size = 7 if cell > 0.1 else 6
    panel = (max(1.1, len(keys) * cell), max(1.0, len(queries) * cell))
    left, below = (LETTER * max(len(token_text(token)) for token in tokens) + 0.1 for tokens in (queries, keys))
    per_row = max(1, min(len(numbers), int((MAX_WIDTH - left - 0.9) / (panel[0] + 0.15))))
    per_row = -(-len(numbers) // -(-len(numbers) // per_row))  # rows of about equal length
    down = -(-len(numbers) // per_row)
    where = [f"{site.role}, layer {site.layer}"] if site else []
    figure = new_figure(
        per_row * (panel[0] + 0.15) + left + 1.2,
        down * (panel[1] + 0.35) + below + 0.2,
        " \u2013 ".join([*where, *([title] if title else []), *cut]) or None,
    )
    every = panel_grid(figure, [1] * len(numbers), [1] * len(numbers), per_row)
    for i, (axes, grid, number) in enumerate(zip(every, grids, numbers, strict=True)):
        mesh = draw_cells(axes, grid, cmap, norm, len(grids))
        axes.set_title(f"head {number}", fontsize=8)
        bare(axes)
        axes.set(xticks=[], yticks=[])
        if i % per_row == 0:
            label_tokens(axes, "y", queries, size)
        if i + per_row >= len(numbers):
            label_tokens(axes, "x", keys, size)
        axes.tick_params(pad=1)
    figure.colorbar(mesh, ax=every, label="attention weight", aspect=max(25, down * panel[1] * 6), pad=0.02)
    figure.supylabel("query token, attends", fontsize=8)
    figure.supxlabel("key token, is attended to", fontsize=8)
    return figure


SIDES = ("query", "key")
