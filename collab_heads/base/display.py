"""Text for reports: tables, and names that mean the same on other machines."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers.utils import logging


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


def progress_bar(iterable: Iterable | None = None, *, disable: bool = False, **options: Any) -> Any:
    """Return a tqdm bar that is shown only where stderr is a terminal or a notebook and transformers shows bars, too.

    In a log file a bar would add a line for every step, and nested bars would be mixed up.

    Args:
        iterable: what the bar iterates over.
        disable: hide the bar everywhere, as in all processes but the first. The environment variable TQDM_DISABLE also
            hides it.
        options: other arguments of tqdm.
    """
    if disable or not (is_watched() and logging.is_progress_bar_enabled()):
        options["disable"] = True
    return tqdm(iterable, **options)


def is_watched() -> bool:
    """Return True if stderr is a terminal or a notebook."""
    return sys.stderr is not None and (sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel"))


@contextmanager
def showing_bars(show: bool) -> Iterator[None]:
    """Hide progress bars while the context is open, those of transformers and huggingface_hub included, unless `show`.

    Args:
        show: leave the bars on; where stderr is neither a terminal nor a notebook they are hidden nevertheless.
    """
    before = logging.is_progress_bar_enabled()
    if not (show and is_watched()):
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()
