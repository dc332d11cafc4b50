"""Pictures for dark pages: the colours that are data stay, ink and ground change places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from collab_heads.analysis.plots.canvas import png_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROUND, INK = "#15161a", "#ececf1"  # those of the report's page
GREY = 0.02  # largest difference between the channels of a colour that is ink or ground, not data
COLOURS = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")


def dark_png_bytes(figure: Figure) -> bytes:
    """Return a figure as a PNG for a dark page; the figure itself is dark afterwards."""
    darken(figure)
    return png_bytes(figure)


def darken(figure: Figure) -> None:
    """Turn black into the ink of a dark page, white into its ground, and greys into those between.

    Text on coloured cells stays: black or white was chosen for the cell.
    """
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

    on_cells = {text for axes in figure.axes for text in axes.texts}
    # figures and axes pass their colours on to patches, which are found themselves
    artists = figure.findobj(lambda each: each not in on_cells and not isinstance(each, Axes | FigureBase))
    for artist in artists:
        changed = {name: dark for name in colours_of(artist) if (dark := darkened(getattr(artist, f"get_{name}")()))}
        for name, dark in changed.items():  # read first: the colours of markers may follow that of their line
            getattr(artist, f"set_{name}")(dark)
    for axes in figure.axes:
        axes.tick_params(which="both", color=INK, labelcolor=INK)  # those that are made when it is drawn, too


def colours_of(artist: Any) -> list[str]:
    """Return the names of the colours of an artist; the faces of what has a colour map are data."""
    is_mapped = getattr(artist, "get_array", lambda: None)() is not None
    names = COLOURS if not is_mapped else ("edgecolor",)
    return [name for name in names if hasattr(artist, f"get_{name}") and hasattr(artist, f"set_{name}")]


def darkened(colour: Any) -> list[tuple[float, ...]] | tuple[float, ...] | None:
    """Return one or several greys for a dark page; None for what is no colour, or has a hue."""
    import numpy as np
    from matplotlib.colors import to_rgba_array

    if isinstance(colour, str) and colour in ("none", "auto", "face"):
        return None
    colours = to_rgba_array(colour)
    shades = colours[:, :3]
    if not len(colours) or (np.ptp(shades, axis=1) > GREY).any():
        return None
    ground, ink = to_rgba_array([GROUND, INK])[:, :3]
    colours[:, :3] = ink + shades * (ground - ink)
    found = [tuple(map(float, each)) for each in colours]
    return found[0] if len(found) == 1 else found  # lines and text take one
