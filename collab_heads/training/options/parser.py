"""Flags as data, and the parser that reads them from the command line or a file.

A flag takes type and default from the signature of the function whose option it is, where there is one. The source of
that function is parsed, which takes milliseconds; importing it would take seconds, because it imports torch.
"""

import argparse
import ast
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from collab_heads.base import option_values
from collab_heads.base.checks import did_you_mean
from collab_heads.base.extras import check_extra
from collab_heads.errors import ArgumentError, DataError
from collab_heads.files.reading import parse_json, read_text
from collab_heads.training.options.value_types import count, positive, seed

PACKAGE = Path(__file__).parents[2]
YAML = (".yaml", ".yml")
Parse = Callable[[str], Any]


class Flag(NamedTuple):
    """A flag: its name, with the two hyphens unless it is positional, the arguments of argparse, and what it needs."""

    name: str
    settings: dict[str, Any]
    needs: tuple[str, ...] = ()


def flag(
    spec: str,
    help: str,
    parse: Parse | None = None,
    default: Any = None,
    *,
    of: tuple[str, str] | None = None,
    option: str | None = None,
    needs: str = "",
    **settings: Any,
) -> Flag:
    """Declare a flag.

    Args:
        spec: "--name VALUE", "--name VALUE..." for several values, or "--name" for a switch.
        help: what `--help` says; the default is added to it.
        parse: reads the value; None for a text.
        default: if the flag is not given.
        of: module and function whose option this is; type, number of values and default are those of the signature.
        option: name of that option, if it is not that of the flag.
        needs: names of flags, with a space between. Without one of them this one has no effect, and is refused where
            users would wait for one; settings of what a run does not do are no request, and pass.
        settings: other arguments of `add_argument`.
    """
    name, _, metavar = spec.partition(" ")
    made: dict[str, Any] = {"help": help}
    if not metavar and name.startswith("-"):
        made |= {"action": "store_true", "default": default or False}
        return Flag(name, made | settings, tuple(needs.split()))
    several = metavar.endswith("...")
    if of is not None:
        found = options_of(*of)[option or name.removeprefix("--")]
        several, parse = found.several, parse or found.parse
        default = None if several else found.default
    made |= {"metavar": metavar.removesuffix("..."), "default": default}
    made |= {"nargs": "+"} if several else {}
    made |= {"type": parse} if parse is not None else {}
    return Flag(name, made | settings, tuple(needs.split()))


def needing(needs: str, *flags: Flag) -> list[Flag]:
    """Return flags that have no effect without one of others, as `flag` takes them."""
    return [each._replace(needs=tuple(needs.split())) for each in flags]


class Option(NamedTuple):
    """A parameter as its signature declares it; `several` means that the flag takes several texts."""

    parse: Parse | None
    several: bool
    default: Any


@cache
def options_of(module: str, function: str) -> dict[str, Option]:
    """Return the parameters that have defaults, by name, of a function of the package.

    Args:
        module: within the package, such as "compression.compress".
        function: name of a top-level function, or of a class, for the parameters of its `__init__`.
    """
    source = (PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    (found,) = [node for node in ast.parse(source).body if getattr(node, "name", None) == function]
    if isinstance(found, ast.ClassDef):
        (found,) = [node for node in found.body if getattr(node, "name", None) == "__init__"]
    assert isinstance(found, ast.FunctionDef)
    named = [*found.args.posonlyargs, *found.args.args]
    defaults = [*[None] * (len(named) - len(found.args.defaults)), *found.args.defaults, *found.args.kw_defaults]
    pairs = zip([*named, *found.args.kwonlyargs], defaults, strict=True)
    return {each.arg: read_option(each, default) for each, default in pairs if default is not None}


def read_option(parameter: ast.arg, default: ast.expr) -> Option:
    annotation = ast.unparse(parameter.annotation) if parameter.annotation else ""
    parsers: dict[str, Parse] = {"int": count, "float": positive}
    parse = seed if parameter.arg == "seed" else parsers.get(annotation.removesuffix(" | None"))
    value = getattr(option_values, default.id) if isinstance(default, ast.Name) else ast.literal_eval(default)
    return Option(parse, "Iterable[" in annotation or "Sequence[" in annotation, value)


WITH_DEMO = ("--demo", "--json", "--quiet")


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

    def __init__(self, *, allow_abbrev: bool = False, formatter_class: type[Help] = Help, **options: Any):
        super().__init__(allow_abbrev=allow_abbrev, formatter_class=formatter_class, **options)
        self.needs: dict[tuple[str, ...], dict[str, Any]] = {}  # what is needed -> by whom, with their defaults

    def add(self, *flags: Flag, group: str | None = None) -> None:
        """Add flags, under the title of a group if there is one."""
        target = self if group is None else self.add_argument_group(group)
        for each in flags:
            action = target.add_argument(each.name, **each.settings)
            if each.needs:
                self.needs.setdefault(each.needs, {})[action.dest] = action.default

    # argparse declares three overloads; this one signature takes all of their arguments
    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does; a file of flags may come first, and later flags override it."""
        args = list(sys.argv[1:] if args is None else args)
        if args and not args[0].startswith("-") and args[0].lower().endswith((".json", *YAML)):
            self.take_defaults(args.pop(0))
        try:
            parsed, unknown = self.parse_known_args(args, namespace)
        except ArgumentError:  # a misspelt flag may be why another seems to be missing
            self.check_known(each for each in args if each.startswith("--"))
            raise
        self.check_known(unknown)
        others = [each.split("=")[0] for each in args if each.startswith("--")]
        if getattr(parsed, "demo", None) and (given := [each for each in others if each not in WITH_DEMO]):
            raise ArgumentError(f"--demo has flags of its own: leave out {', '.join(given)}")
        self.check_needs(parsed)
        return parsed

    def print_help(self, file: Any = None) -> None:
        """Print the help; argparse would pass over an error of the output."""
        print(self.format_help(), end="", file=file, flush=True)

    def check_needs(self, args: argparse.Namespace) -> None:
        """Raise ArgumentError for flags that have no effect without another."""
        for needs, defaults in self.needs.items():
            values = [getattr(args, name, None) for name in needs]
            if any(value is not None and value is not False for value in values):  # 0 is a value
                continue
            if given := [f"--{name}" for name, default in defaults.items() if getattr(args, name) != default]:
                *most, last = (f"--{name}" for name in needs)
                one = f"{', '.join(most)} or {last}" if most else last
                raise ArgumentError(f"{', '.join(given)} {'needs' if len(given) == 1 else 'need'} {one}")

    def check_known(self, flags: Iterable[str]) -> None:
        """Raise ArgumentError for the first unknown flag, with the nearest one."""
        for each in flags:
            if not each.startswith("-"):
                raise ArgumentError(f"unexpected argument {each!r}")
            self.check_name("flag", each.split("=")[0], self._option_string_actions)

    @staticmethod
    def check_name(what: str, name: str, known: Iterable[str]) -> None:
        """Raise ArgumentError unless a flag is known: there are too many to list them."""
        if name not in known:
            raise ArgumentError(f"unknown {what} {name!r}{did_you_mean(name, known)}; --help shows all")

    def take_defaults(self, file: str) -> None:
        """Read a file of flags; its values replace the defaults, and flags of the command line override them."""
        known = {action.dest: action for action in self._actions if action.dest != "help"}
        for name, value in read_flags(file).items():
            self.check_name(f"flag in {file}:", name, known)
            action = known[name]
            if value is None:
                continue
            try:
                action.default = value_of(action, value)
            except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
                raise ArgumentError(f"{file}: {name}: {error or repr(value)}") from error
            action.required = False
            if not action.option_strings:
                action.nargs = "?"

    def error(self, message: str) -> NoReturn:
        """Raise ArgumentError instead of printing the usage and exiting."""
        raise ArgumentError(f"{message} (see --help)")


def read_flags(file: str) -> dict[str, Any]:
    """Read the flags of a JSON or YAML file: names, with or without the two hyphens, and values."""
    try:
        flags = (parse_yaml if file.lower().endswith(YAML) else parse_json)(read_text(file))
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{file}: not a file of flags: {str(error).splitlines()[0]}") from error
    if not isinstance(flags, dict):
        raise DataError(f'{file}: a file of flags is one object, such as {{"seed": 1}}, not a {type(flags).__name__}')
    return {str(name).removeprefix("--"): value for name, value in flags.items()}


def parse_yaml(text: str) -> Any:
    check_extra("yaml", "flags in YAML")
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from error


def value_of(action: argparse.Action, value: Any) -> Any:
    """Return the value that the command line would give for one from a file."""
    if action.nargs == 0 and not isinstance(value, bool):
        raise ValueError(f"{value!r} is not true or false")
    if action.nargs == 0 or (action.nargs == "?" and value is True):
        return value if action.nargs == 0 else action.const
    parse = action.type if callable(action.type) else str
    if action.nargs in ("+", "*"):
        return [parse(as_argument(each)) for each in (value if isinstance(value, list) else [value])]
    return parse(as_argument(value))


def as_argument(value: Any) -> str:
    """Format a value as it is written on the command line: {"enc-self": 32} as enc-self=32."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ",".join(f"{name}={as_argument(each)}" for name, each in value.items())
    if isinstance(value, list) or value is None:
        raise ValueError(f"{json.dumps(value)} is not one value")
    if isinstance(value, bool):
        raise ValueError(f'{json.dumps(value)} is not a value for it (a word, such as "no", is written in quotes)')
    return repr(value)
