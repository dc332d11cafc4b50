"""The types of the values of flags: each parses a text, or raises an error that argparse quotes with its name."""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from collab_heads.base.checks import size_in_bytes
from collab_heads.base.option_values import ROLES
from collab_heads.errors import ArgumentError

MAX_COUNT, MAX_SEED, MAX_EPOCHS = 2**31 - 1, 2**32 - 2**16, 10_000
AUTO = "auto"  # lets the task choose the number
Value = TypeVar("Value")


class PathName(str):
    """The name of a file or folder on the command line, or of a model or data set, which may be on the Hub."""


def path(text: str) -> PathName:
    """Parse the name of a file or folder; inputs named by flags of this type are never overwritten or deleted."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty (a shell variable that is not set?)")
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} has a null byte in it")
    return PathName(text)


def input_paths(args: argparse.Namespace) -> list[str]:
    """Return the files and folders that the run reads: the values of all `path` flags except the output folder."""
    values = [value for name, value in vars(args).items() if name != "output_dir"]
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return [each for each in flat if isinstance(each, PathName)]


def stored_value(value: Any) -> Any:
    """Return the value of a flag as JSON and checkpoints store it: paths become strings."""
    if isinstance(value, list):
        return [stored_value(each) for each in value]
    return str(value) if isinstance(value, PathName) else value


def width(text: str) -> int | float:
    """Parse "128" as a width and "0.5" as a share."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def interval(text: str) -> int | str:
    """Parse a number of steps, or "epoch"."""
    return text if text == "epoch" else count_from_1(text)


def count(text: str, least: int = 0, most: int = MAX_COUNT) -> int:
    """Parse a whole number from `least` to `most`."""
    value = int(text)
    if value < 0 <= least:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is too small: {least} or more")
    if value > most:
        raise argparse.ArgumentTypeError(f"{text} is too large: {most:,} at most")
    return value


def count_from_1(text: str) -> int:
    """Parse a whole number from 1."""
    return count(text, least=1)


def seed(text: str) -> int:
    """Parse a seed that every generator accepts, also after processes and phases have added their numbers to it."""
    return count(text, most=MAX_SEED)


def epochs(text: str) -> float:
    """Parse a number of epochs, whole or not."""
    if not_negative(text) > MAX_EPOCHS:
        raise argparse.ArgumentTypeError(f"{text} is too large: {MAX_EPOCHS:,} at most; --max_train_steps takes more")
    return float(text)


def epochs_or_auto(text: str) -> float | str:
    """Parse a number of epochs, or "auto"."""
    return text if text == AUTO else epochs(text)


def finite(text: str) -> float:
    """Parse a finite number."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} must be a finite number")
    return value


def not_negative(text: str) -> float:
    """Parse a finite number from 0."""
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} must be a finite number, 0 or more")
    return value


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    if not_negative(text) == 0:
        raise argparse.ArgumentTypeError("0 is too small")
    return float(text)


def share_or_size(text: str) -> float | str:
    """Parse a number above 0, or a size such as 10MB."""
    try:
        return positive(text)
    except ValueError:
        pass
    try:
        size_in_bytes(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def below_1(text: str, said: str = "must be below 1") -> float:
    """Parse a number from 0 to below 1."""
    if not_negative(text) >= 1:
        raise argparse.ArgumentTypeError(f"{text} {said}")
    return float(text)


def share_of_steps(text: str) -> float:
    """Parse a share of the steps, below 1."""
    return below_1(text, "is a share of the steps, below 1")


# argparse quotes these names
epochs_or_auto.__name__, share_of_steps.__name__ = f"number of epochs, or {AUTO}", "share"
below_1.__name__ = "decay"


def utf8(given: str) -> str:
    """Parse a text for a tokenizer, which takes no bytes of other encodings than that of the terminal."""
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{given!r:.80} is not a text in UTF-8") from error
    return given


utf8.__name__ = "text"


def per_role(
    value: Callable[[str], Value], roles: Sequence[str] = ROLES, kind: str = "role", what: str = "number"
) -> Callable[[str], Value | dict[str, Value]]:
    """Return a parser for "18" and for "enc-self=4,dec-self=4", whose single values `value` parses.

    Args:
        value: parses one value.
        roles: the names that may stand before "=".
        kind: what these names are, for messages.
        what: what the values are, for messages.
    """

    def parse(text: str) -> Value | dict[str, Value]:
        if "=" not in text:
            return value(text)
        values: dict[str, Value] = {}
        for part in text.split(","):
            role, _, given = part.partition("=")
            if role.strip() not in roles or role.strip() in values:
                raise argparse.ArgumentTypeError(f"{part!r} is not one {kind}={what} of {', '.join(roles)}")
            values[role.strip()] = value(given)
        return values

    parse.__name__ = f"{what}, or {kind}={what},"  # argparse quotes it
    return parse
