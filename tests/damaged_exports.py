"""Exported folders, damaged and edited in many ways, and what loading and calling them comes to."""

import copy
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from collab_heads import load_exported
from collab_heads.errors import ArgumentError, DataError

WAYS_OUT = ("export the model again", "check=False")
OTHERS: tuple[Any, ...] = (None, True, 0, -1, 1.5, 10**30, "x", "../x", [], {}, [1], {"x": 1})
HOSTILE = (  # type, context, and how many parts: each makes torch or transformers import or call something
    (
        "collections.defaultdict",
        {"default_factory_module": "hostile", "default_factory_name": "f", "dict_context": []},
        0,
    ),
    ("builtins.dict", json.dumps([{"__enum__": True, "fqn": "hostile:f", "name": "x"}]), 1),
    ("builtins.tuple", json.dumps({"__enum__": True, "fqn": "hostile:f", "name": "x"}), 1),
    ("transformers.cache_utils:DynamicCache", json.dumps({"_t": "seq", "p": "hostile:f", "v": []}), 0),
    ("transformers.cache_utils:DynamicCache", json.dumps({"_t": "type", "p": "hostile:f"}), 0),
    ("transformers.cache_utils:DynamicCache", json.dumps({"_t": "map", "p": "os:system", "v": {}}), 0),
    ("transformers.hostile.f", json.dumps([]), 0),
    ("hostile.f", json.dumps([]), 0),
)
LEAF = {"type": None, "context": None, "children_spec": []}


def edits(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (what was done, a copy with one place deleted, renamed, retyped or replaced), for every place below."""
    if isinstance(value, str) and value[:1] in "[{" and value:
        for what, edited in edits(json.loads(value)):
            yield f"in text, {what}", json.dumps(edited)
    if isinstance(value, dict):
        yield from with_parts(value, list(value.items()), dict)
        for key in value:
            yield f"{key} renamed", {(f"{name}_" if name == key else name): each for name, each in value.items()}
            yield f"{key} deleted", {name: each for name, each in value.items() if name != key}
        yield "one added", {**value, "added": 1}
    if isinstance(value, list):
        yield from with_parts(value, list(enumerate(value)), lambda pairs: [each for _, each in pairs])
        for number in range(len(value)):
            yield f"{number} deleted", value[:number] + value[number + 1 :]
        yield "reversed", value[::-1]
        yield "longer", value + value[-1:]


def with_parts(value: Any, parts: list[tuple[Any, Any]], build: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value with one part replaced by others, or edited."""
    for key, part in parts:
        near = [part + 1] if type(part) is int else [part + "x"] if isinstance(part, str) else []
        for other in (*OTHERS, *near):
            if repr(other) != repr(part):
                yield f"{key} = {other!r}", build([(name, other if name == key else each) for name, each in parts])
        for what, edited in edits(part):
            yield f"{key}: {what}", build([(name, edited if name == key else each) for name, each in parts])


def hostile(description: dict) -> Iterator[tuple[str, dict]]:
    """Yield descriptions of an export whose inputs or outputs are of types that nobody should import."""
    for graph, field in ((graph, field) for graph in description["components"] for field in ("in_spec", "out_spec")):
        for kind, context, count in HOSTILE:
            edited = copy.deepcopy(description)
            spec = {"type": kind, "context": context, "children_spec": [LEAF] * count}
            whole = json.loads(edited["components"][graph]["metadata"][field])
            for place in ([1, spec], [1, {**whole[1], "children_spec": [*whole[1]["children_spec"][:-1], spec]}]):
                edited["components"][graph]["metadata"][field] = json.dumps(place)
                yield f"{graph}.{field} of {kind}, {context!r:.60}", copy.deepcopy(edited)


def copied(good: Path, place: Path, *, manifest: bool = True) -> Path:
    """Copy a folder; by hand, perhaps, without its manifest."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(good, place)
    if not manifest:
        (place / "manifest.json").unlink()
    return place


def flipped(good: Path, place: Path, count: int, seed: int = 0) -> Iterator[str]:
    """Flip one bit of one file in a copy of a folder, again and again; files take turns, but for the card."""
    rng, files = random.Random(seed), sorted(file.name for file in good.iterdir() if file.name != "README.md")
    for number in range(count):
        file = copied(good, place) / files[number % len(files)]
        content = bytearray(file.read_bytes())
        position, bit = rng.randrange(len(content)), rng.randrange(8)
        content[position] ^= 1 << bit
        file.write_bytes(content)
        yield f"{file.name}: bit {bit} of byte {position}"


@torch.no_grad()
def outcome(folder: Path, inputs: dict, expected: Any, **options: Any) -> str:
    """Return what comes of loading and calling: "seen", "refused", "same", or what should not be."""
    try:
        served = load_exported(folder, threads=1, **options)
    except DataError as error:
        is_helpful = str(folder) in str(error) and any(way in str(error) for way in WAYS_OUT)
        return "seen" if is_helpful else f"without file or way out: {error}"
    except Exception as error:
        return f"raw, when loaded: {error!r:.200}"
    try:
        found = served(**inputs)
    except ArgumentError:
        return "refused"
    except Exception as error:
        return f"raw, when called: {error!r:.200}"
    try:
        is_same = type(found) is type(expected) and list(found) == list(expected)
        is_same = is_same and all(map(equal, found.values(), expected.values()))
    except Exception as error:
        return f"other, {error!r:.200}"
    return "same" if is_same else "other"


def equal(found: Any, expected: Any) -> bool:
    """Return True if two outputs are the same, bit for bit; also caches."""
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if hasattr(expected, "self_attention_cache"):
        return equal(found.self_attention_cache, expected.self_attention_cache)
    pairs = zip(found.layers, expected.layers, strict=True)
    return all(torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs)


def unwanted(outcomes: Counter) -> list[str]:
    """Return the outcomes that should not be."""
    return [each for each in outcomes if each.split(":")[0] not in ("seen", "refused", "same")]
