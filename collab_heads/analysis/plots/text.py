"""Tokens as labels: any script, any character, on any machine."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    """Return the code points of a font's characters; none if matplotlib cannot draw it."""
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(file).get_charmap())
    except (OSError, RuntimeError):  # a bitmap font, such as one of colour emoji, or a damaged one
        return frozenset()
