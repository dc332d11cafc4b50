"""Types and defaults of flags, from the signatures of the functions whose options they are.

An option is declared once, in a signature. To import its function would take seconds, for torch; its source takes
milliseconds to parse.
"""

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from collab_heads.base import option_values
from collab_heads.command.flags.parsing import count, positive, seed

PACKAGE = Path(__file__).parents[2]
# The parser of a flag's text by the annotation of the parameter; other annotations are texts.
PARSERS: dict[str, Callable[[str], Any]] = {
    "int": count,
    "int | None": count,
    "float": positive,
    "float | None": positive,
}
OWN_PARSERS: dict[str, Callable[[str], Any]] = {"seed": seed}


class Option(NamedTuple):
    """What a signature says of a parameter: how a flag parses its text, how many texts it takes, and its default."""

    parse: Callable[[str], Any] | None
    several: bool
    default: Any


@cache
def options_of(module: str, function: str) -> dict[str, Option]:
    """Return the parameters of a function of the package that have defaults, by their names.

    Args:
        module: within the package, such as "compression.compress".
        function: a function at its top, or a class, for the arguments of its `__init__`.
    """
    source = (PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    (found,) = [node for node in ast.parse(source).body if getattr(node, "name", None) == function]
    if isinstance(found, ast.ClassDef):
        (found,) = [node for node in found.body if getattr(node, "name", None) == "__init__"]
    assert isinstance(found, ast.FunctionDef)
    named = [*found.args.posonlyargs, *found.args.args]
    defaults = [*[None] * (len(named) - len(found.args.defaults)), *found.args.defaults, *found.args.kw_defaults]
    pairs = zip([*named, *found.args.kwonlyargs], defaults, strict=True)
    return {each.arg: option(each, default) for each, default in pairs if default is not None}


def option(parameter: ast.arg, default: ast.expr) -> Option:
    annotation = ast.unparse(parameter.annotation) if parameter.annotation else ""
    parse = OWN_PARSERS.get(parameter.arg, PARSERS.get(annotation))
    value = getattr(option_values, default.id) if isinstance(default, ast.Name) else ast.literal_eval(default)
    return Option(parse, "Iterable[" in annotation or "Sequence[" in annotation, value)


def option_adder(add: Callable[..., object], module: str, function: str) -> Callable[..., None]:
    """Return a function that adds the flag of an option.

    Args:
        add: `add_argument` of a parser or a group.
        module: as in `options_of`.
        function: likewise.
    """

    def add_option(name: str, *, metavar: str, help: str, flag: str | None = None, **changed: Any) -> None:
        """Add a flag.

        Args:
            name: of the option; the flag's, too, unless `flag` says otherwise.
            metavar: as argparse takes it.
            help: likewise.
            flag: its name without dashes.
            changed: of what argparse takes, what differs from the signature.
        """
        made = options_of(module, function)[name]
        given: dict[str, Any] = {} if made.parse is None else {"type": made.parse}
        if made.several:
            given |= {"nargs": "+"}
        else:
            given |= {"default": made.default}
        add(f"--{flag or name}", metavar=metavar, help=help, **given | changed)

    return add_option
