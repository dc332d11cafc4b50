"""Figures, their colours and their files; people with any kind of colour vision can tell the colours apart."""

from __future__ import annotations

import functools
import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from collab_heads.base.extras import check_extra
from collab_heads.errors import ArgumentError
from collab_heads.files.atomic import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure


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
    """Return one scale for all arrays: sequential, or diverging about a centre.

    Args:
        values: the arrays; NaN is ignored.
        lowest: the lower end of the scale; None for the smallest value.
        highest: the upper end; None for the largest value.
        centre: the middle of a diverging scale; None for 0 if the scale has both signs.
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
    """Return which ends of a colour bar need an arrow: "neither", "min", "max" or "both"."""
    below = any(bool((each < norm.vmin).any()) for each in values)
    above = any(bool((each > norm.vmax).any()) for each in values)
    return {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}[below, above]


def ink(colour: tuple[float, float, float, float] | str) -> str:
    """Return black or white, whichever is easier to read on a colour."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return "black" if np.dot([0.2126, 0.7152, 0.0722], linear) > EQUAL_CONTRAST else "white"


def short_numbers(values: Sequence[np.ndarray]) -> str:
    """Return a format that shows the differences between values in about four characters."""
    largest = max((float(np.nanmax(np.abs(each))) for each in values if np.isfinite(each).any()), default=0.0)
    if largest == 0:
        return "{:.0f}"
    if not 0.005 <= largest < 10000:
        return "{:.0e}"
    return f"{{:.{0 if largest >= 100 else 1 if largest >= 10 else 2 if largest >= 0.1 else 3}f}}"


MAX_WIDTH = 11.0  # inches: the width of a page on a screen
PNG_DPI = 150
GREY = "#d9d9d9"
MANY_WORDS = 300  # in a figure: as paths, their letters would be most of an SVG file
STYLE = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib
    "font.size": 8,
    "axes.titlesize": 9,
    "figure.titlesize": 10,
    "hatch.linewidth": 0.6,
    "hatch.color": "#808080",
    "text.parse_math": False,  # "$" in a token or in the name of a model is a dollar
    "svg.fonttype": "path",  # looks the same where the font is not installed; but see MANY_WORDS
    "svg.hashsalt": "collab_heads",  # else ids are random
}


def check_matplotlib() -> None:
    """Check, before long work, that pictures can be drawn.

    Raises:
        MissingPackageError: if matplotlib is not installed.
    """
    check_extra("plots", "pictures")


@contextmanager
def our_style(more: Mapping[str, str] | None = None) -> Iterator[None]:
    """Draw in our style, with more settings; the user's settings are restored afterwards."""
    check_matplotlib()
    import matplotlib.style

    with matplotlib.style.context(["default", STYLE | dict(more or {})]):
        yield


def drawn(function: Callable[..., Figure]) -> Callable[..., Figure]:
    """Decorate a function that draws a figure: use our style, and let notebooks show the figure without pyplot."""

    @functools.wraps(function)
    def draw(*args, **options) -> Figure:
        with our_style():
            figure = function(*args, **options)
        # what notebooks ask an object for; matplotlib gives it to figures of pyplot only
        setattr(figure, "_repr_png_", functools.partial(png_bytes, figure))  # noqa: B010
        return figure

    return draw


def new_figure(width: float, height: float, title: str | None = None) -> Figure:
    """Return an empty figure of a size in inches; a long title is wrapped."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
    figure = Figure(figsize=(width, height + (0.3 if title else 0)), layout=layout)
    if title:
        figure.suptitle(textwrap.fill(title, max(20, int(width * 13))))
    return figure


def panel_grid(figure: Figure, widths: Sequence[float], heights: Sequence[float], per_row: int) -> list[Axes]:
    """Return axes for panels, left to right in rows; widths and heights are proportions."""
    rows = [range(start, min(start + per_row, len(widths))) for start in range(0, len(widths), per_row)]
    across = [max(widths[i] for i in range(column, len(widths), per_row)) for column in range(len(rows[0]))]
    down = [max(heights[i] for i in row) for row in rows]
    grid = figure.add_gridspec(len(rows), len(across), width_ratios=across, height_ratios=down)
    return [figure.add_subplot(grid[i // per_row, i % per_row]) for i in range(len(widths))]


def in_rows(widths: Sequence[float], most: float = MAX_WIDTH) -> int:
    """Return how many panels fit side by side, at least one; widths are in inches."""
    fitting = [n for n in range(1, len(widths) + 1) if sum(sorted(widths)[-n:]) <= most]
    per_row = max(fitting, default=1)
    return math.ceil(len(widths) / math.ceil(len(widths) / per_row))  # rows of about equal length


def thinned(numbers: Sequence[int], most: int) -> list[int]:
    """Return every n-th of the numbers, at most `most` of them: 0, 2, 4, ..."""
    return list(numbers[:: max(1, math.ceil(len(numbers) / most))])


def bare(axes: Axes) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(which="both", length=0)


def png_bytes(figure: Figure, dpi: int = PNG_DPI) -> bytes:
    """Return a figure as a PNG of 256 colours, a third of the size of full colour; equal figures, equal bytes."""
    from PIL import Image  # matplotlib needs it, too

    with Image.open(io.BytesIO(file_bytes(figure, "png", dpi, {"Software": None}))) as whole:
        few = whole.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        resolution = whole.info["dpi"]
    buffer = io.BytesIO()
    few.save(buffer, "png", optimize=True, dpi=resolution)
    return buffer.getvalue()


def svg_bytes(figure: Figure) -> bytes:
    """Return a figure as an SVG, with lengths in hundredths of points; equal figures give equal bytes."""
    from matplotlib.text import Text

    words = sum(bool(text.get_text()) for text in figure.findobj(Text))
    form = {"svg.fonttype": "none" if words > MANY_WORDS else "path"}
    drawn = file_bytes(figure, "svg", PNG_DPI, {"Date": None, "Creator": None, "Format": None, "Type": None}, form)
    return re.sub(rb"(?<=\.\d\d)\d+|(?<=\n) +", b"", drawn)


def file_bytes(figure: Figure, kind: str, dpi: int, metadata: dict, style: Mapping[str, str] | None = None) -> bytes:
    """Return a figure as a file.

    Its layout is kept for the next format, since computing it takes longer than drawing.
    """
    buffer = io.BytesIO()
    with our_style(style):
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=metadata)
    figure.set_layout_engine("none")
    return buffer.getvalue()


def save_figure(figure: Figure, path: str | Path) -> tuple[Path, Path]:
    """Write a figure as PNG and as SVG; complete files replace old ones. Equal figures give equal bytes.

    Args:
        figure: any matplotlib figure.
        path: the path without a suffix; folders are created.

    Returns:
        The paths of the PNG and of the SVG file.

    Raises:
        ArgumentError: if the path ends in ".png" or ".svg".
        MissingPackageError: if matplotlib is not installed.
    """
    return save_drawings(check_path(path), png_bytes(figure), svg_bytes(figure))


def check_path(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix.lower() in (".png", ".svg"):
        raise ArgumentError(f"a figure is saved as PNG and as SVG: give {str(path)!r} without {path.suffix!r}")
    return path


def save_drawings(path: str | Path, png: bytes, svg: bytes) -> tuple[Path, Path]:
    """Write files that are drawn already, like `save_figure`."""
    path = check_path(path)
    return write_file(path.with_name(f"{path.name}.png"), png), write_file(path.with_name(f"{path.name}.svg"), svg)
