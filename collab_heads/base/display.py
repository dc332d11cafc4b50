"""Text for reports: tables, and names that mean the same on other machines."""

from collections.abc import Sequence
from pathlib import Path


def portable_name(name: str) -> str:
    """Return the name of a model or file without this machine's folders: the last two parts of an absolute path.

    Any other name is returned unchanged.
    """
    path = Path(name)
    return "/".join(path.parts[1:][-2:]) if path.is_absolute() else name


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], last: str) -> str:
    """Format columns under a header, followed by a closing line."""
    rows = [header, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:], last])


MUCH, MOST = 0.2, 0.5  # shares of an output


def loss_in_words(share: float) -> str:
    """Return what it means that a share of an output is lost; empty if it is less than a fifth."""
    if share >= MOST:
        return "note: most of the output is lost: without training the model will be of little use"
    if share >= MUCH:
        return "note: much of the output is lost: measure the model on its task before you use it"
    return ""
