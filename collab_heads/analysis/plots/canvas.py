"""Where pictures are drawn: figures without pyplot, in one style that does not depend on the user's settings."""

from __future__ import annotations

import functools
import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from collab_heads.extras import check_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    """Draw in our style, and with more settings; the user's settings are back afterwards.

    Raises:
        MissingPackageError: if matplotlib is not installed.
    """
    check_matplotlib()
    import matplotlib.style

    with matplotlib.style.context(["default", STYLE | dict(more or {})]):
        yield


def drawn(function: Callable[..., Figure]) -> Callable[..., Figure]:
    """Decorate a function that draws a figure: our style, and a figure that notebooks show without pyplot."""

    @functools.wraps(function)
    def draw(*args, **options) -> Figure:
        with our_style():
            figure = function(*args, **options)
        # what notebooks ask an object for; matplotlib gives it to figures of pyplot only
        setattr(figure, "_repr_png_", functools.partial(png_bytes, figure))  # noqa: B010
        return figure

    return draw


def new_figure(width: float, height: float, title: str | None = None) -> Figure:
    """An empty figure of so many inches; a long title is wrapped."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
    figure = Figure(figsize=(width, height + (0.3 if title else 0)), layout=layout)
    if title:
        figure.suptitle(textwrap.fill(title, max(20, int(width * 13))))
    return figure


def panel_grid(figure: Figure, widths: Sequence[float], heights: Sequence[float], per_row: int) -> list[Axes]:
    """Axes for panels of given sizes, left to right in rows; their sizes are proportions."""
    rows = [range(start, min(start + per_row, len(widths))) for start in range(0, len(widths), per_row)]
    across = [max(widths[i] for i in range(column, len(widths), per_row)) for column in range(len(rows[0]))]
    down = [max(heights[i] for i in row) for row in rows]
    grid = figure.add_gridspec(len(rows), len(across), width_ratios=across, height_ratios=down)
    return [figure.add_subplot(grid[i // per_row, i % per_row]) for i in range(len(widths))]


def in_rows(widths: Sequence[float], most: float = MAX_WIDTH) -> int:
    """How many panels fit beside each other; at least one."""
    fitting = [n for n in range(1, len(widths) + 1) if sum(sorted(widths)[-n:]) <= most]
    per_row = max(fitting, default=1)
    return math.ceil(len(widths) / math.ceil(len(widths) / per_row))  # rows of about equal length


def thinned(numbers: Sequence[int], most: int) -> list[int]:
    """Every so many of the numbers, at most `most`: 0, 2, 4, ..."""
    return list(numbers[:: max(1, math.ceil(len(numbers) / most))])


def bare(axes: Axes) -> None:
    """Take the frame and the marks of the ticks away; the labels stay."""
    axes.spines[:].set_visible(False)
    axes.tick_params(which="both", length=0)


def png_bytes(figure: Figure, dpi: int = PNG_DPI) -> bytes:
    """A figure as a PNG file of 256 colours, a third of one of all; the same figure gives the same bytes."""
    from PIL import Image  # matplotlib needs it, too

    with Image.open(io.BytesIO(file_bytes(figure, "png", dpi, {"Software": None}))) as whole:
        few = whole.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        resolution = whole.info["dpi"]
    buffer = io.BytesIO()
    few.save(buffer, "png", optimize=True, dpi=resolution)
    return buffer.getvalue()


def svg_bytes(figure: Figure) -> bytes:
    """A figure as an SVG file; the same figure gives the same bytes. Lengths are in points, to a hundredth."""
    from matplotlib.text import Text

    words = sum(bool(text.get_text()) for text in figure.findobj(Text))
    form = {"svg.fonttype": "none" if words > MANY_WORDS else "path"}
    drawn = file_bytes(figure, "svg", PNG_DPI, {"Date": None, "Creator": None, "Format": None, "Type": None}, form)
    return re.sub(rb"(?<=\.\d\d)\d+|(?<=\n) +", b"", drawn)


def file_bytes(figure: Figure, kind: str, dpi: int, metadata: dict, style: Mapping[str, str] | None = None) -> bytes:
    """A figure as a file. Its layout is kept for the next format, since making it takes longer than drawing."""
    buffer = io.BytesIO()
    with our_style(style):
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=metadata)
    figure.set_layout_engine("none")
    return buffer.getvalue()
