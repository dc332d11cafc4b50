"""Types and defaults of flags, read from the signatures of the functions whose options they are.

An option is declared only once, in a signature. The source is parsed, which takes milliseconds; importing the function
would take seconds, because it imports torch.
"""

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from collab_heads.base import option_values
from collab_heads.command.flags.parsing import count, positive, seed

PACKAGE = Path(__file__).parents[2]
# Annotation of a parameter -> the parser of its flag; other parameters are texts.
PARSERS: dict[str, Callable[[str], Any]] = {
    "int": count,
    "int | None": count,
    "float": positive,
    "float | None": positive,
}
OWN_PARSERS: dict[str, Callable[[str], Any]] = {"seed": seed}


class Option(NamedTuple):
    """A parameter as its signature declares it.

    Attributes:
        parse: parses the text of the flag; None for a plain text.
        several: whether the flag takes several texts.
        default: of the parameter.
    """

    parse: Callable[[str], Any] | None
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
        function: as in `options_of`.
    """

    def add_option(name: str, *, metavar: str, help: str, flag: str | None = None, **changed: Any) -> None:
        """Add the flag of an option.

        Args:
            name: name of the option, and of the flag unless `flag` is given.
            metavar: as in argparse.
            help: as in argparse.
            flag: name of the flag without dashes.
            changed: arguments of `add_argument` that replace those from the signature.
        """
        made = options_of(module, function)[name]
        given: dict[str, Any] = {} if made.parse is None else {"type": made.parse}
        if made.several:
            given |= {"nargs": "+"}
        else:
            given |= {"default": made.default}
        add(f"--{flag or name}", metavar=metavar, help=help, **given | changed)

    return add_option
