"""Validators of arguments: each message names the thing, the value and the way out."""

import difflib
import itertools
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

from collab_heads.errors import ArgumentError

# how alike two names must be, by difflib; at 0.6 "tensorrt" would be near to "transformers"
NEAR, BEGINS_NEAR = 0.65, 0.85


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the known name that is nearest, or has the nearest beginning; else nothing."""
    names = list(known)
    begun = {each[: len(str(name)) + 1]: each for each in names}
    near = difflib.get_close_matches(str(name), begun, n=1, cutoff=BEGINS_NEAR)
    near = near or difflib.get_close_matches(str(name), names, n=1, cutoff=NEAR)
    return f" (did you mean {begun.get(near[0], near[0])!r}?)" if near else ""


def missing_folder(name: str) -> str:
    """Return the message that there is no such folder, with the one beside it whose name is nearest."""
    path = Path(name)
    beside: list[str] = []
    with suppress(OSError, ValueError):  # ValueError: a null byte
        beside = [each.name for each in path.parent.iterdir() if each.is_dir()]
    near = difflib.get_close_matches(path.name, beside, n=1)
    return f"there is no folder {name!r:.200}" + (f" (did you mean {str(path.with_name(near[0]))!r}?)" if near else "")


def shortened(names: Collection[object], most: int = 12) -> str:
    """Return names for a message, separated by commas: all, or the first and how many there are."""
    shown = ", ".join(f"{name!s:.80}" for name in itertools.islice(names, most))
    return shown if len(names) <= most else f"{shown}, … ({len(names):,} in all)"


def check_choice(what: str, value: object, choices: Iterable[str]) -> None:
    """Raise ArgumentError unless `value` is one of `choices`; the message lists them and suggests the nearest."""
    choices = list(choices)
    if value not in choices:
        raise ArgumentError(f"unknown {what} {value!r}{did_you_mean(str(value), choices)}; known: {', '.join(choices)}")


def check_count(what: str, value: object, least: int = 0, most: int | None = None) -> None:
    """Raise ArgumentError unless `value` is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"{what} {value!r} must be a whole number, {least} or more")
    if most is not None and value > most:
        raise ArgumentError(f"{what} {value!r:.40} is too large: {most:,} at most")


def check_seed(seed: object) -> None:
    """Raise ArgumentError unless `seed` is a whole number that every generator accepts."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < MAX_SEED:
        raise ArgumentError(f"seed must be a whole number from 0 to {MAX_SEED - 1}, not {seed!r:.80}")


MAX_SEED = 1 << 32  # numpy's limit, below torch's


SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMG]?)B")
PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def size_in_bytes(size: str) -> float:
    """Return the bytes of a size such as "10MB".

    Raises:
        ArgumentError: if it is none.
    """
    found = SIZE.fullmatch(size.strip())
    if found is None or not float(found[1]):
        raise ArgumentError(f"{size!r:.40} must be a size such as '10MB' (kB, MB or GB), or a share such as 0.5")
    return float(found[1]) * PREFIXES[found[2]]


def is_count(value: object) -> TypeGuard[int]:
    """Return True if `value` is a positive integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_size(value: object) -> TypeGuard[int]:
    """Return True if `value` can be a number of heads or a width: a positive integer, not absurdly large."""
    return is_count(value) and value <= MAX_SIZE


MAX_SIZE = 1 << 24  # beyond any model; products of two fit what torch counts in


def is_number(value: object) -> TypeGuard[float]:
    """Return True if `value` is a finite number, not a bool, and not larger than the largest float."""
    largest = sys.float_info.max
    return isinstance(value, int | float) and not isinstance(value, bool) and -largest <= value <= largest


def is_index(value: object, size: int) -> TypeGuard[int]:
    """Return True if `value` is an integer from 0 to size - 1 and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Return True if `value` is a sequence, such as a list or tuple, and not a string."""
    return isinstance(value, Sequence) and not isinstance(value, str)
