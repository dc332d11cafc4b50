"""Maps of one sentence, token by token: the attention of the heads of a site, and contributions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from collab_heads.errors import ArgumentError, NonFiniteError, ShapeError
from collab_heads.plots.canvas import MAX_WIDTH, bare, colour_scale, drawn, new_figure, panel_grid
from collab_heads.plots.head_maps import draw_cells
from collab_heads.sites.site import AttentionSite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIDES = ("query", "key")
MANY = 24  # tokens: more are written smaller
LETTER = 0.065  # inches of a letter in the labels
SHOWN = 200  # tokens of a side, in a map of contributions
NARROW = 40  # tokens of a side: with more, cells and labels are smaller
CELL, SMALL_CELL = 0.19, 0.09  # inches


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


@drawn
def contribution_map(
    source: Tensor,
    target: Tensor,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    said: Sequence[str],
    *,
    names: tuple[str, str] = ("source", "target prefix"),
    title: str | None = None,
) -> Figure:
    """Draw what every token of one sentence contributes to every generated token.

    Every generated token has a row, which sums to one. A long sentence is cut after 200 tokens a side, which the title
    says.

    Args:
        source: [P, S], contributions of the source tokens, see `TokenRelevance.contributions`.
        target: [P, T], those of the target prefix.
        source_tokens: [S].
        target_tokens: [T].
        said: [P], the explained tokens.
        names: the names of the two sides.
        title: a title for the figure.

    Raises:
        ArgumentError: if there is nothing to show.
        ShapeError: if contributions and tokens do not fit each other.
        MissingPackageError: if matplotlib is not installed.
    """
    sizes = (len(said), len(source_tokens), len(target_tokens))
    if tuple(source.shape) != (sizes[0], sizes[1]) or tuple(target.shape) != (sizes[0], sizes[2]):
        raise ShapeError(f"contributions {tuple(source.shape)} and {tuple(target.shape)} for {sizes} tokens")
    if 0 in sizes:
        raise ArgumentError(f"nothing to show of {sizes} generated, {names[0]} and {names[1]} tokens")
    cut = [f"the first {SHOWN} of {size} tokens" for size in sizes if size > SHOWN]
    grids = [each[:SHOWN, :SHOWN].double().numpy() for each in (source, target)]
    columns = [list(tokens)[:SHOWN] for tokens in (source_tokens, target_tokens)]
    cmap, norm = colour_scale(grids, lowest=0.0, highest=max(float(each.max()) for each in grids))
    cell, size = (CELL, 7.0) if max(sizes) <= NARROW else (SMALL_CELL, 5.0)
    widths = [max(1.0, len(tokens) * cell) for tokens in columns]
    shown = " \u2013 ".join([*([title] if title else []), *dict.fromkeys(cut)]) or None
    figure = new_figure(sum(widths) + 2.6, max(1.0, len(grids[0]) * cell) + 1.5, shown)
    panels = figure.subplots(1, 2, width_ratios=widths, squeeze=False)[0]
    for axes, grid, tokens, name in zip(panels, grids, columns, names, strict=True):
        mesh = draw_cells(axes, grid, cmap, norm, 2)
        axes.set_title(name, fontsize=8)
        bare(axes)
        axes.set(xticks=[], yticks=[])
        label_tokens(axes, "x", tokens, size)
    label_tokens(panels[0], "y", list(said)[:SHOWN], size)
    panels[0].set_ylabel("generated token")
    figure.colorbar(mesh, ax=list(panels), label="contribution", aspect=25, pad=0.02)
    return figure


UNKNOWN = "\u25a1"  # a hollow box
SPACE = "\u2423"
FAMILY = "DejaVu Sans"
LONGEST = 18


def token_text(token: str) -> str:
    """Return a readable token: spaces as open boxes, invisible characters as escapes, cut if it is very long."""
    seen = "".join(SPACE if c == " " else c if c.isprintable() else ascii(c)[1:-1] for c in token)
    return seen if len(seen) <= LONGEST else seen[: LONGEST - 1] + "\u2026"


def label_tokens(axes: Axes, which: str, tokens: Sequence[str], size: float) -> None:
    """Write tokens beside the cells of an axis ("x" or "y"), each at its index.

    The installed fonts are searched for the characters; a character that none of them has is drawn as a hollow box.
    """
    texts = [token_text(token) for token in tokens]
    families, unknown = fonts_for("".join(sorted(set("".join(texts)))))
    texts = ["".join(UNKNOWN if c in unknown else c for c in text) for text in texts]
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_ticks(range(len(texts)))
    labels = axis.set_ticklabels(texts, fontsize=size, rotation=90 if which == "x" else 0)
    for label in labels:
        label.set_fontfamily(list(families))
        label.set_parse_math(False)


@functools.cache
def fonts_for(characters: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return installed font families that together have the characters, and the characters that none has."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager

    families, missing = [], {ord(c) for c in characters}
    others = sorted({font.name for font in fontManager.ttflist if "Last Resort" not in font.name} - {FAMILY})
    for family in (FAMILY, *others):
        if not missing:
            break
        found = missing & covered(findfont(FontProperties(family=[family])))  # the very file that will be used
        if found:
            families.append(family)
            missing -= found
    return tuple(families or [FAMILY]), frozenset(map(chr, missing))


@functools.cache
def covered(file: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(file).get_charmap())
    except (OSError, RuntimeError):  # a bitmap font, such as one of colour emoji, or a damaged one
        return frozenset()
