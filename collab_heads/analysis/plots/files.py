"""Pictures as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from collab_heads.analysis.plots.canvas import png_bytes, svg_bytes
from collab_heads.errors import ArgumentError
from collab_heads.files import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: Figure, path: str | Path) -> tuple[Path, Path]:
    """Write a figure as PNG and as SVG; complete files replace old ones. The same figure gives the same bytes.

    Args:
        figure: any matplotlib figure.
        path: without a suffix; folders are made.

    Returns:
        The paths of the PNG and of the SVG file.

    Raises:
        ArgumentError: if the path ends in ".png" or ".svg".
        MissingPackageError: if matplotlib is not installed.
    """
    return save_drawings(check_path(path), png_bytes(figure), svg_bytes(figure))


def check_path(path: str | Path) -> Path:
    """The path, unless it has the suffix of a picture."""
    path = Path(path)
    if path.suffix.lower() in (".png", ".svg"):
        raise ArgumentError(f"a figure is saved as PNG and as SVG: give {str(path)!r} without {path.suffix!r}")
    return path


def save_drawings(path: str | Path, png: bytes, svg: bytes) -> tuple[Path, Path]:
    """As `save_figure`, of what was drawn already."""
    path = check_path(path)
    return write_file(path.with_name(f"{path.name}.png"), png), write_file(path.with_name(f"{path.name}.svg"), svg)
