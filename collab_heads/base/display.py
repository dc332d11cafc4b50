"""Text for reports: tables, and names that mean the same on other machines."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers.utils import logging


def portable_name(name: str) -> str:
    """What a model or a file is called anywhere: the last two parts of an absolute path; any other name as it is."""
    path = Path(name)
    return "/".join(path.parts[1:][-2:]) if path.is_absolute() else name


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], last: str) -> str:
    """Columns under a header, and a closing line."""
    rows = [header, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:], last])


def progress_bar(iterable: Iterable | None = None, *, disable: bool = False, **options: Any) -> Any:
    """A bar of tqdm, shown where stderr is a terminal or a notebook, unless those of transformers are off.

    In a log a bar is a line for every step, and nested ones are mixed up.

    Args:
        iterable: what is gone through.
        disable: also where bars are shown, such as in all processes but the first; the environment variable
            TQDM_DISABLE does so, too.
        options: of tqdm.
    """
    if disable or not (is_watched() and logging.is_progress_bar_enabled()):
        options["disable"] = True
    return tqdm(iterable, **options)


def is_watched() -> bool:
    """Return whether stderr is a terminal or a notebook."""
    return sys.stderr is not None and (sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel"))


@contextmanager
def showing_bars(show: bool) -> Iterator[None]:
    """Switch bars off while the context is open, transformers' and huggingface_hub's too: unless they are to be shown.

    Args:
        show: whether they are, on a terminal.
    """
    before = logging.is_progress_bar_enabled()
    if not (show and is_watched()):
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()
