"""Check the arguments of public functions against their signatures, before anything else happens."""

import functools
import inspect
import os
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.base.wrappers import check_model
from collab_heads.errors import ArgumentError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Types with a check of their own, whose message says more: shapes of tensors, contents of batches. `self` has none.
CHECKED_ELSEWHERE = (Any, object, inspect.Parameter.empty, Tensor, Iterable[Mapping])
NUMBERS = (int, float)
# arguments with a check of their own
NAMES = ("adapter", "exclude", "optimizer", "pairs", "schedule", "sites", "stretch")
# Wider types that are accepted, too: a model may be wrapped in a module, and each function says what it takes.
AS_GOOD: dict[Any, type] = {PreTrainedModel: nn.Module, Path: os.PathLike, tuple: Sequence}
WORDS: dict[Any, str] = {
    types.NoneType: "None",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    Callable: "a function",
    Mapping: "a dict",
    Sequence: "a list",
    Iterable: "a list",
}


def checking_arguments(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a public function so that it checks the types of its arguments against its signature.

    A wrong argument raises UnsupportedModelError where the signature asks for a model, and ArgumentError elsewhere.
    Numbers of NumPy, alone or in a list or a dict, become those of Python.
    """

    @functools.wraps(function)
    def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        signature = signature_of(function)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # too many, or too few: Python says so itself
            return function(*args, **kwargs)
        given = bound.arguments
        for name, value in given.items():
            given[name] = value = in_python(value)
            hint = signature.parameters[name].annotation
            hint = Any if isinstance(hint, str) else hint
            if is_scalar_array(value) and hint is not object:
                raise ArgumentError(f"{name} must be {words(hint)}, not {value!r:.80}")
            if name not in NAMES:
                check_argument(name, value, hint)
        return function(*bound.args, **bound.kwargs)

    return wrapper


def in_python(value: Any) -> Any:
    """Return an argument with the numbers of Python for those of NumPy, of which each has a type of its own."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple) and any(isinstance(each, np.generic) for each in value):
        return type(value)(map(in_python, value))
    if type(value) is dict and any(isinstance(each, np.generic) for each in value.values()):
        return {name: in_python(each) for name, each in value.items()}
    return value


def is_scalar_array(value: object) -> bool:
    """Return True for a tensor or an array without dimensions: it looks like an iterable, and is none."""
    return isinstance(value, Iterable) and getattr(value, "ndim", None) == 0


@functools.cache
def signature_of(function: Callable) -> inspect.Signature:
    """Return a signature with types for the names of types, where these are known at run time.

    The decorator reads it at the first call, because a module may define a type after the function that names it.
    """
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:  # one is imported `if TYPE_CHECKING`
        return inspect.signature(function)


def check_argument(name: str, value: object, hint: Any) -> None:
    """Raise ArgumentError, or for a model UnsupportedModelError, unless a value has a type."""
    if fits(value, hint):
        return
    if hint in (PreTrainedModel, nn.Module):
        check_model(value)
    raise ArgumentError(f"{name} must be {words(hint)}, not {value!r:.80}")


def fits(value: object, hint: Any, *, inside: bool = False) -> bool:
    """Return True if a value has a type, as far as this can be seen without consuming an iterator.

    Args:
        value: the argument.
        hint: the type.
        inside: whether the value is an element of an argument. A number that is itself an argument always fits here,
            because it has a check of its own.
    """
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if hint in CHECKED_ELSEWHERE:
        return True
    if hint in NUMBERS:
        return not inside or isinstance(value, Number)
    if origin in (Union, types.UnionType):
        return any(fits(value, each, inside=inside) for each in inner)
    if origin is Literal:
        return isinstance(value, tuple(map(type, inner)))
    if origin is Path:
        return isinstance(value, os.PathLike)
    if hint is str and not inside and isinstance(value, str) and "\0" in value:  # no file has such a name
        return False
    if origin is type:
        return isinstance(value, type) and issubclass(value, inner[0])
    if not isinstance(value, AS_GOOD.get(origin, origin)) or (isinstance(value, str | bytes) and hint is not str):
        return False
    if not inner or not isinstance(value, Collection) or isinstance(value, Tensor):
        return True
    if origin is Mapping and isinstance(value, Mapping):
        pairs = [each for pair in value.items() for each in zip(pair, inner, strict=True)]
    elif origin is tuple and inner[-1] is not ...:
        pairs = list(zip(value, inner, strict=False)) if len(value) == len(inner) else [(None, str)]
    else:
        pairs = [(each, inner[0]) for each in value]
    return all(fits(each, of, inside=True) for each, of in pairs)


def words(hint: Any) -> str:
    """Return the description of a type for an error message, such as "a whole number"."""
    origin, inner = get_origin(hint) or hint, [each for each in get_args(hint) if each is not ...]
    if origin in (Union, types.UnionType):
        *most, last = dict.fromkeys(map(words, inner))
        return f"{', '.join(most)} or {last}" if most else last
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin is type:
        return f"a class of {inner[0].__name__}"
    plain = WORDS.get(origin) or f"a {origin.__name__}"
    return f"{plain} ({' -> '.join(map(words, inner))})" if inner and origin in (Mapping, Sequence, Iterable) else plain
