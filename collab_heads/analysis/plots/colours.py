"""Colours that people with any kind of colour vision can tell apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from collab_heads.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.colors import Colormap, Normalize

# Okabe and Ito 2008, "Color Universal Design"
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
MARKERS = "osD^vPX*"
LINES = ("-", "--", "-.", ":")
SEQUENTIAL, DIVERGING = "viridis", "PuOr_r"
# The luminance at which black and white text have the same contrast (WCAG 2.2, "relative luminance").
EQUAL_CONTRAST = 0.179


def colour_scale(
    values: Sequence[np.ndarray],
    *,
    lowest: float | None = None,
    highest: float | None = None,
    centre: float | None = None,
) -> tuple[Colormap, Normalize]:
    """One scale for all arrays: sequential, or diverging about a centre.

    Args:
        values: the arrays; NaN is not counted.
        lowest: the end of the scale; the extreme of the values if None.
        highest: the other end.
        centre: the middle of a diverging scale; 0 if None and the scale has both signs.

    Raises:
        ArgumentError: if an end or the centre is not finite, or the ends do not have this order.
    """
    import matplotlib
    from matplotlib.colors import Normalize

    for name, given in (("lowest", lowest), ("highest", highest), ("centre", centre)):
        if given is not None and not math.isfinite(given):
            raise ArgumentError(f"{name} must be a finite number, not {given!r}")
    known = np.concatenate([each[np.isfinite(each)].ravel() for each in values] or [np.zeros(0)])
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    low, high = low if lowest is None else lowest, high if highest is None else highest
    if low > high or (None not in (lowest, highest) and low == high):
        raise ArgumentError(f"a scale from {low:g} to {high:g} has no colours: lowest must be below highest")
    if centre is None and low < 0 < high:
        centre = 0.0
    if centre is not None:
        bound = max(abs(low - centre), abs(high - centre)) or 1.0
        return matplotlib.colormaps[DIVERGING], Normalize(centre - bound, centre + bound)
    if low == high:  # all are equal: any width will do
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    return matplotlib.colormaps[SEQUENTIAL], Normalize(low, high)


def beyond(values: Sequence[np.ndarray], norm: Normalize) -> str:
    """Which ends of a colour bar need an arrow: "neither", "min", "max" or "both"."""
    below = any(bool((each < norm.vmin).any()) for each in values)
    above = any(bool((each > norm.vmax).any()) for each in values)
    return {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}[below, above]


def ink(colour: tuple[float, float, float, float] | str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return "black" if np.dot([0.2126, 0.7152, 0.0722], linear) > EQUAL_CONTRAST else "white"


def short_numbers(values: Sequence[np.ndarray]) -> str:
    """A format that shows the differences between values in about four characters."""
    largest = max((float(np.nanmax(np.abs(each))) for each in values if np.isfinite(each).any()), default=0.0)
    if largest == 0:
        return "{:.0f}"
    if not 0.005 <= largest < 10000:
        return "{:.0e}"
    return f"{{:.{0 if largest >= 100 else 1 if largest >= 10 else 2 if largest >= 0.1 else 3}f}}"
