"""JSON files of our own: what they hold has a version, and each is replaced as a whole."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from collab_heads.errors import DataError
from collab_heads.files import write_file
from collab_heads.reading import parse_json, read_text

T = TypeVar("T")
WRONG = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError)  # of a file that was changed


def write_document(path: str | Path, content: Mapping) -> Path:
    """Write one line of JSON; an old file is replaced when the new one is complete.

    Raises:
        OutputError: if it cannot be written; what was there stays.
        ValueError: if a number is NaN or infinite, which JSON does not know.
    """
    return write_file(path, (json.dumps(content, allow_nan=False) + "\n").encode())


def read_document(path: str | Path, version: int, what: str, build: Callable[[Any], T]) -> T:
    """What a file of ours holds.

    Args:
        path: the file.
        version: which this package reads.
        what: it holds, for the message.
        build: makes it from the parsed JSON.

    Raises:
        DataError: if the file is missing, damaged or of another version.
    """
    try:
        stored = parse_json(read_text(path))
    except DataError as error:
        raise DataError(f"cannot read {error}") from error
    except ValueError as error:
        raise DataError(f"{path} is no {what}: {error!r:.200}") from error
    return built(stored, version, f"{path} is no {what}", build)


def built(stored: Any, version: int, problem: str, build: Callable[[Any], T]) -> T:
    """What parsed JSON stands for.

    Args:
        stored: the JSON.
        version: which this package reads.
        problem: what a message begins with.
        build: makes it.

    Raises:
        DataError: if the JSON is something else, or of another version.
    """
    try:
        if stored["version"] != version:
            raise DataError(f"{problem}: it is of version {stored['version']!r}; this package reads version {version}")
        return build(stored)
    except DataError:
        raise
    except WRONG as error:
        raise DataError(f"{problem}: {error!r:.200}") from error
