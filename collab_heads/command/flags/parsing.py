"""The parser of the command line, which suggests the nearest flag, and the types of the flags' values."""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

from collab_heads.base.checks import check_choice
from collab_heads.base.option_values import ROLES
from collab_heads.command.flags.flag_files import as_argument, check_old_flag, is_flag_file, read_flags
from collab_heads.errors import ArgumentError

MAX_COUNT, MAX_SEED, MAX_EPOCHS = 2**31 - 1, 2**32 - 2**16, 10_000
AUTO = "auto"  # lets the task choose the number


class Help(argparse.RawDescriptionHelpFormatter):
    """A help formatter that keeps the lines of the description and appends the default of every flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default, text = action.default, action.help or ""
        says_nothing = default is None or default is False or default in ("", argparse.SUPPRESS)
        if says_nothing or not action.option_strings or "(default:" in text:
            return text
        return f"{text} (default: %(default)s)".strip()


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that suggests the nearest flag for an unknown one; flags cannot be abbreviated."""

    def __init__(
        self, *, allow_abbrev: bool = False, formatter_class: type[argparse.HelpFormatter] = Help, **options: Any
    ):
        super().__init__(allow_abbrev=allow_abbrev, formatter_class=formatter_class, **options)

    # argparse declares three overloads; this one signature takes all of their arguments
    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does; a file of flags may come first, and later flags override it.

        Raises:
            ArgumentError: if a flag is unknown or wrong; the message suggests the nearest flag.
            DataError: if the file of flags cannot be read.
        """
        args = list(sys.argv[1:] if args is None else args)
        if args and is_flag_file(args[0]):
            self.take_defaults(args.pop(0))
        try:
            parsed, unknown = self.parse_known_args(args, namespace)
        except ArgumentError:  # a misspelt flag may be why another seems to be missing
            self.check_known(each for each in args if each.startswith("--"))
            raise
        self.check_known(unknown)
        return parsed

    def print_help(self, file: Any = None) -> None:
        """Print the help; argparse would pass over an error of the output."""
        print(self.format_help(), end="", file=file, flush=True)

    def check_known(self, flags: Iterable[str]) -> None:
        """Raise ArgumentError for the first unknown flag, with the nearest one or its replacement here."""
        for flag in flags:
            name = flag.split("=")[0]
            if not flag.startswith("-"):
                raise ArgumentError(f"unexpected argument {flag!r}")
            if name not in self._option_string_actions:
                check_old_flag(name)
                check_choice("flag", name, self._option_string_actions)

    def add_quiet(self) -> None:
        """Add the flag `--quiet`."""
        self.add_argument(
            "--quiet", action="store_true", help="no progress bars; there are none where stderr is a file"
        )

    def take_defaults(self, file: str) -> None:
        """Read a file of flags; its values replace the defaults, and flags of the command line override them.

        Raises:
            ArgumentError: if a flag is unknown, or its value is invalid; for an unknown flag the nearest is suggested.
            DataError: if the file cannot be read.
        """
        known = {action.dest: action for action in self._actions if action.dest != "help"}
        for name, value in read_flags(file).items():
            if name not in known:
                check_old_flag(f"--{name}")
            check_choice(f"flag in {file}:", name, known)
            if value is None:
                continue
            try:
                known[name].default = self.value_of(known[name], value)
            except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
                raise ArgumentError(f"{file}: {name}: {error or repr(value)}") from error
            known[name].required = False
            if not known[name].option_strings:
                known[name].nargs = "?"

    @staticmethod
    def value_of(action: argparse.Action, value: Any) -> Any:
        """Convert a value from a file to the one that the command line would give."""
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise ValueError(f"{value!r} is not true or false")
            return value
        if action.nargs == "?" and value is True:
            return action.const
        parse = action.type if callable(action.type) else str
        if action.nargs in ("+", "*"):
            return [parse(as_argument(each)) for each in (value if isinstance(value, list) else [value])]
        return parse(as_argument(value))

    def error(self, message: str) -> NoReturn:
        """Raise ArgumentError instead of printing the usage and exiting."""
        raise ArgumentError(f"{message} (see --help)")


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


epochs_or_auto.__name__ = f"number of epochs, or {AUTO}"  # argparse quotes it


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


def decay(text: str) -> float:
    """Parse the decay of a running mean: from 0 to below 1."""
    if not_negative(text) >= 1:
        raise argparse.ArgumentTypeError(f"{text} must be below 1")
    return float(text)


def share_of_steps(text: str) -> float:
    """Parse a share of the steps, below 1."""
    if not_negative(text) >= 1:
        raise argparse.ArgumentTypeError(f"{text} is a share of the steps, below 1")
    return float(text)


share_of_steps.__name__ = "share"  # argparse quotes it


Value = TypeVar("Value")


def text(given: str) -> str:
    """Parse a text for a tokenizer, which takes no bytes of other encodings than that of the terminal."""
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{given!r:.80} is no text in UTF-8") from error
    return given


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
