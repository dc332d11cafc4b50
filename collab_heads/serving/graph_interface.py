"""The inputs and outputs of a served graph: what it takes, and the form of what it puts out, checked.

The manifest of an export describes the outputs. PyTorch reads such a description by importing what it names, and calls
it. So none is handed on that holds anything but tuples, lists, dicts and transformers' outputs, with names that the
graph itself has. A cache becomes a dict of its tensors.
"""

import dataclasses
import importlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from collab_heads.base.checks import did_you_mean
from collab_heads.errors import ArgumentError
from collab_heads.files.reading import parse_json
from collab_heads.sites.record import check_keys
from collab_heads.sites.state import expect

PROTOCOL = 1  # of torch's descriptions
SEQUENCES, MAPPINGS = ("builtins.tuple", "builtins.list"), ("builtins.dict", "collections.OrderedDict")
IMPORTED = re.compile(r"transformers\.(modeling_outputs|models\.\w+\.modeling_\w+)")
CACHE_TYPE = re.compile(r"[\w.]+:\w*Cache")
MARK = "output."  # before the name of an output that is also one of an input
Names = Sequence[str]


def output_tree(stored: str, outputs: Sequence[Names], constants: Sequence[int]) -> str:
    """Return a description of outputs that is safe to read, in the form of `torch.utils._pytree.treespec_dumps`.

    Args:
        stored: the description in the manifest.
        outputs: the names of each output of the graph.
        constants: the numbers of the leaves that are not outputs of the graph.

    Raises:
        ValueError: if it names another type, or does not fit the graph.
    """
    total, named = len(outputs) + len(constants), iter(outputs)
    leaves = iter([None if number in constants else unmarked(next(named)) for number in range(total)])
    tree = checked_node(root_of(stored), "", leaves)
    expect(
        next(leaves, ...) is ..., "the number of outputs", total - len(list(leaves)) - 1, f"{total}, as the graph has"
    )
    return json.dumps([PROTOCOL, tree])


def output_paths(stored: str) -> list[str]:
    """Return the path of each leaf in a description of outputs, as `output_tree` names them.

    Raises:
        ValueError: if it names another type.
    """

    def paths(node: object, path: str) -> Iterator[str]:
        kind, context, children = parts_of(node, path)
        if kind is None:
            yield path or "output"
            return
        for name, child in zip(names_of(kind, context, len(children), path), children, strict=True):
            yield from paths(child, joined(path, name))

    return list(paths(root_of(stored), ""))


def input_tree(names: Sequence[str]) -> str:
    """Return a description of inputs, all of them tensors that are passed by name."""
    below = {"type": "builtins.dict", "context": json.dumps(list(names)), "children_spec": [LEAF] * len(names)}
    empty = {"type": SEQUENCES[0], "context": "null", "children_spec": []}
    return json.dumps([PROTOCOL, {**empty, "children_spec": [empty, below]}])


def unmarked(names: Names) -> list[str]:
    """Return the names of an output without the mark."""
    return [name.removeprefix(MARK) for name in names]


def root_of(stored: object) -> object:
    """Return the root of a stored description."""
    expect(isinstance(stored, str), "a description of inputs or outputs", stored, "a text")
    parsed = parse_json(stored)  # type: ignore[arg-type]
    is_pair = isinstance(parsed, list) and len(parsed) == 2 and parsed[0] == PROTOCOL
    expect(is_pair, "a description of inputs or outputs", stored, f"one of protocol {PROTOCOL}")
    return parsed[1]


def checked_node(node: object, path: str, leaves: Iterator[Names | None]) -> dict:
    """Return a node of the description with those below it; each leaf takes the next output, which has its name."""
    kind, context, children = parts_of(node, path)
    if kind is None:
        return checked_leaf(path, leaves)
    if CACHE_TYPE.fullmatch(kind):
        return checked_cache(children, path, leaves)
    names = names_of(kind, context, len(children), path)
    below = [checked_node(child, joined(path, name), leaves) for name, child in zip(names, children, strict=True)]
    return {"type": kind, "context": context, "children_spec": below}


def parts_of(node: object, path: str) -> tuple[str | None, object, list]:
    """Return type, context and children of a node."""
    entries = check_keys(node, set(FIELDS), f"the output {path!r}", FIELDS)
    kind, context, children = (entries[name] for name in FIELDS)
    expect(isinstance(children, list), f"children_spec of {path!r}", children, "a list")
    expect(kind is None or isinstance(kind, str), f"the type of {path!r}", kind, "a text or null")
    if kind is None:
        expect(context is None and not children, f"the output {path!r}", node, "a leaf, without context and children")
    return kind, context, children


FIELDS = ("type", "context", "children_spec")
LEAF: dict = {"type": None, "context": None, "children_spec": []}


def checked_leaf(path: str, leaves: Iterator[Names | None]) -> dict:
    """Return a leaf, which takes the next output."""
    found = next(leaves, ())
    expect(
        found is None or (path or "output") in found, "the output", path, f"one of the graph, which has {found} there"
    )
    return LEAF


def checked_cache(children: list, path: str, leaves: Iterator[Names | None]) -> dict:
    """Return a dict of the tensors of a cache, by their paths in it; the class that is named is not needed."""
    names = []
    for number, child in enumerate(children):
        expect(parts_of(child, path)[0] is None, f"the cache {path!r}", child, "one of tensors")
        found = next(leaves, ())
        within = [str(number)] if found is None else [name for name in found if name.startswith(f"{path}.")]
        expect(bool(within), f"the cache {path!r}", found, "one whose tensors are outputs of the graph")
        names.append(within[0].removeprefix(f"{path}."))
    return {"type": "builtins.dict", "context": json.dumps(names), "children_spec": [LEAF] * len(names)}


def names_of(kind: str, context: object, count: int, path: str) -> list[str]:
    """Return the names of the parts of a node.

    Raises:
        ValueError: if its type is none of the list, or the names do not fit it.
    """
    if kind in SEQUENCES:
        expect(context == "null", f"the context of {path!r}", context, "null, as a list has it")
        return [str(number) for number in range(count)]
    names: Any = parse_json(context) if isinstance(context, str) else None
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names) and len(set(names)) == count
    expect(is_list and len(names) == count, f"the context of {path!r}", context, f"a list of {count} different names")
    if kind not in MAPPINGS:
        fields = {field.name for field in dataclasses.fields(output_class(kind))}
        expect(fields.issuperset(names), f"the names in {path!r}", names, f"fields of {kind}")
    return names


def output_class(kind: str) -> type:
    """Return a class of transformers' outputs; no module is imported but transformers' own.

    Raises:
        ValueError: if the name is of anything else.
    """
    module, _, name = kind.rpartition(".")
    if IMPORTED.fullmatch(module):
        importlib.import_module(module)
    found = getattr(sys.modules.get(module), name, None)
    is_output = isinstance(found, type) and issubclass(found, ModelOutput) and dataclasses.is_dataclass(found)
    expect(is_output, "the type of an output", kind, "a tuple, a list, a dict, or an output of transformers")
    return found  # type: ignore[return-value]


def joined(path: str, name: str) -> str:
    """Return the path of a part."""
    return f"{path}.{name}" if path else name


def input_names(stored: object) -> list[str]:
    """Return the names of the inputs in a description of inputs: positional ones, of which there are none, and a dict.

    Raises:
        ValueError: if it describes something else.
    """
    kind, context, children = parts_of(root_of(stored), "inputs")
    names_of(str(kind), context, 2, "inputs")
    (_, _, positional), (named, names, below) = (parts_of(child, "inputs") for child in children)
    expect(not positional and named == "builtins.dict", "the inputs", kind, "a dict")
    found = names_of(str(named), names, len(below), "inputs")
    for name, node in zip(found, below, strict=True):
        checked_node(node, name, itertools.repeat(None))  # of types that are known, too
    return found


def is_all(number: int) -> Callable[[Any], bool]:
    """Return a test of whether all elements of a tensor are a number."""
    return lambda value: isinstance(value, Tensor) and bool((value == number).all())


def is_flag(*allowed: bool) -> Callable[[Any], bool]:
    """Return a test of whether a value is one of some booleans."""
    return lambda value: isinstance(value, bool) and value in allowed


# input that a graph does not take -> the value without which it computes the same, in words, and whether one is that
ASSUMED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "attention_mask": ("ones", is_all(1)),
    "decoder_attention_mask": ("ones", is_all(1)),
    "token_type_ids": ("zeros", is_all(0)),
    "return_dict": ("True", is_flag(True)),
    "use_cache": ("True or False", is_flag(True, False)),
    "output_attentions": ("False", is_flag(False)),
    "output_hidden_states": ("False", is_flag(False)),
    "logits_to_keep": ("0", lambda value: isinstance(value, int) and value == 0),
}
TOKEN_TYPES = "type_vocab_size"  # of configs: the model has token types, and takes zeros for those that are left out


def has_token_types(config: Any) -> bool:
    """Return True if a model takes zeros for token types that are not given; some read them as more tokens."""
    return hasattr(config, TOKEN_TYPES)


def taken(given: Mapping[str, Any], names: set[str], constants: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the inputs that a graph takes; a mask or token types that are not given have their defaults.

    Args:
        given: name -> input, or None.
        names: of the inputs of the graph.
        constants: the values of those that are fixed in it.
        config: of the model.

    Raises:
        ArgumentError: if an input is missing, or one is given that the graph does not take, unless it changes nothing.
    """
    found = {name: value for name, value in given.items() if value is not None}
    for name in found.keys() - (names - constants.keys()):
        check_changes_nothing(name, found.pop(name), names, constants, config)
    if "input_ids" in found:
        defaults = {"attention_mask": torch.ones_like}
        if has_token_types(config):
            defaults["token_type_ids"] = torch.zeros_like
        for name in defaults.keys() & names:
            found.setdefault(name, defaults[name](found["input_ids"]))
    if missing := sorted(names - found.keys() - constants.keys()):
        raise ArgumentError(f"the graph takes {', '.join(missing)}, too: pass them, or export with other batches")
    return found


def check_changes_nothing(name: str, value: Any, names: set[str], constants: Mapping[str, Any], config: Any) -> None:
    """Raise ArgumentError unless a graph that does not take an input computes what it would with it."""
    if name in constants:
        text, is_assumed = repr(constants[name]), type(value) is type(constants[name]) and value == constants[name]
    else:
        text, test = ASSUMED.get(name, ("", lambda value: False))
        is_assumed = test(value) and (name != "token_type_ids" or has_token_types(config))
    if not is_assumed:
        takes = ", ".join(sorted(names - constants.keys()))
        fixed = f", and has {text} for {name}" if text else did_you_mean(name, names)
        raise ArgumentError(
            f"the graph takes no {name}, but {takes}{fixed}: leave it out, or export with batches that hold it"
        )
