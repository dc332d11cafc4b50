"""Read the folder of an export: each file is checked before an engine, PyTorch or transformers reads it.

A folder comes from anywhere. Its files are those of its manifest, with the digests there; `export.json` names files in
the folder, and fits the graphs; nothing that it names is imported or called, but for classes of transformers' outputs.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING, GenerationConfig, PretrainedConfig

from collab_heads.base.checks import MAX_SIZE, did_you_mean, is_index
from collab_heads.base.extras import check_extra
from collab_heads.errors import DataError
from collab_heads.files.folders import MANIFEST, damage, read_manifest
from collab_heads.files.reading import parse_json, read_text
from collab_heads.saving.source_files import OF_TEXTS, SETTINGS, files_in
from collab_heads.serving.graph_engines import AGAIN, ENGINES, Port, check_inside
from collab_heads.serving.graph_interface import input_names, output_tree
from collab_heads.serving.search_settings import settings_from
from collab_heads.serving.target import first_line
from collab_heads.serving.text_reader import EMBEDDING, Texts, read_texts
from collab_heads.sites.record import check_keys
from collab_heads.sites.state import expect

EXPORT, CONFIG, GENERATION = "export.json", "config.json", "generation_config.json"  # as transformers names them
CACHES = "cache.json"  # the shapes of the cache of every layer, beside the graphs
SINGLE, ENCODER, DECODER = "model", "encoder", "decode"  # names of graphs
CODE = (
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
)  # in a config: may name some


class Exported(NamedTuple):
    """The content of a folder.

    Attributes:
        model: transformers' model, not yet in its engine.
        engine: the engine.
        caches: the shapes of the caches.
        texts: how a sentence encoder reads texts; None for another model.
        width: of its embeddings.
        limits: the largest shape of each input, by name, where the engine has such limits.
    """

    model: Any
    engine: str
    caches: list[list[int]]
    texts: Texts | None
    width: int
    limits: dict[str, tuple[int, ...]]


def read_exported(folder: Path, check: bool) -> Exported:
    """Read what `export` wrote for an engine of graphs.

    Args:
        folder: the folder.
        check: whether files are compared with the digests in the manifest of the folder, if it has one.

    Raises:
        DataError: if a file is damaged, contradicts another one, or is not what `export` writes.
        MissingPackageError: if the engine is not installed.
    """
    from transformers.exporters.auto import get_exporter_class
    from transformers.exporters.base import ExportedComponent, ExportedModel

    check_folder(folder)
    if check:
        ends = tuple(Path(name).suffix for kind in ENGINES.values() for name in kind.names)
        graphs = [each.name for each in folder.iterdir() if each.suffix in ends]
        check_digests(folder, [EXPORT, CONFIG, GENERATION, CACHES, OF_TEXTS, SETTINGS, *graphs])
    with naming(folder / EXPORT):
        engine, described = read_description(read_json(folder, EXPORT))
    check_extra(engine, f"models in {engine}")
    config, generation = read_configs(folder)
    caches = read_caches(folder)
    with naming(folder / EXPORT):
        wanted = {ENCODER, DECODER} if config.is_encoder_decoder and caches else {SINGLE}
        expect(
            set(described) == wanted, "components", sorted(described), f"{sorted(wanted)} for this {config.model_type}"
        )
    exporter, kind = get_exporter_class(engine), ENGINES[engine]
    weights = {name for graph in described for name in kind.files(graph)[1:]}
    components, texts, width, limits = {}, None, 0, dict[str, tuple[int, ...]]()
    for name, metadata in described.items():
        path = folder / kind.files(name)[0]
        with naming(path):
            kind.check(path, weights)
            program = exporter.load_program(path)
            inputs, outputs = kind.ports(program, metadata)
        with naming(folder / EXPORT):
            safe = dataclasses.replace(fitted(metadata, inputs, outputs), in_spec=kind.input_tree(metadata))
            components[name] = ExportedComponent(program, safe)
            limits |= kind.limits(program, metadata)
        with naming(folder / CACHES):
            check_caches(name, caches, inputs, outputs)
        if embedding := next((port for port in outputs if EMBEDDING in port.names), None):
            texts, width = read_texts(folder), embedding.shape[-1] or 0
    return Exported(ExportedModel(components, engine, config, generation), engine, caches, texts, width, limits)


def check_folder(folder: Path) -> None:
    """Raise DataError unless a path leads to a folder with an export."""
    try:
        is_folder = folder.is_dir()
        siblings = [] if is_folder else [each.name for each in folder.parent.iterdir() if each.is_dir()]
    except (OSError, ValueError):  # ValueError: a null byte
        is_folder, siblings = False, []
    if not is_folder:
        guess = did_you_mean(folder.name, siblings) or ", where export wrote a model"
        raise DataError(f"no such folder: {str(folder)!r:.300}{guess}")
    if not (folder / EXPORT).exists():
        way = "load a checkpoint with from_pretrained, and what was exported to ctranslate2 with ctranslate2"
        if within := sorted(place.parent.name for place in folder.glob(f"*/{EXPORT}")):
            way = f"the exports are in {', '.join(within)}: load one of these folders"
        raise DataError(f"{folder} has no {EXPORT}, so it is not an export to {', '.join(ENGINES)}: {way}")


def check_digests(folder: Path, read: Sequence[str]) -> None:
    """Raise DataError, naming the file, unless each file that is read is in the manifest, and as it was written.

    Args:
        folder: the folder; one without a manifest is not checked.
        read: the names of the files, beside those of a tokenizer.
    """
    if wrong := damage(folder):
        raise DataError(f"{folder} is damaged: {wrong}: {AGAIN}, or pass check=False if you changed it yourself")
    if (folder / MANIFEST).exists():
        listed = (read_manifest(folder) or {})["files"]
        names = [*read, *(each.name for each in files_in(folder))]
        if others := [name for name in names if name not in listed and (folder / name).exists()]:
            raise DataError(
                f"{folder} is damaged: {MANIFEST} does not list {', '.join(others)}: {AGAIN}, or pass check=False"
            )


def read_json(folder: Path, name: str) -> Any:
    """Return the content of a JSON file in the folder."""
    check_inside(folder / name)
    return parse_json(read_text(folder / name))


def is_text(value: object) -> bool:
    """Return True if a value is a string."""
    return isinstance(value, str)


def is_sizes(value: object) -> bool:
    """Return True if a value is a list of sizes; where no head is left, one is 0."""
    return isinstance(value, list) and all(is_index(size, MAX_SIZE) for size in value)


def is_input(entry: object) -> bool:
    """Return True if a value describes an input: a tensor, tensors by name, or the name of a class."""
    if not isinstance(entry, Mapping):
        return False
    if set(entry) == {"rank", "shape", "dtype"}:
        return is_sizes(entry["shape"]) and entry["rank"] == len(entry["shape"]) and is_text(entry["dtype"])
    if set(entry) == {"leaves"}:
        return isinstance(entry["leaves"], Mapping) and all(map(is_input, entry["leaves"].values()))
    return set(entry) == {"container"} and is_text(entry["container"])


def is_constant(pair: object) -> bool:
    """Return True if a value says of an output, by its number, that it is None."""
    return isinstance(pair, list) and len(pair) == 2 and is_index(pair[0], 1 << 20) and pair[1] is None


DTYPES = ("float32", "float16", "bfloat16", "float64")
DESCRIPTION, COMPONENT = ("schema_version", "export_format", "components"), ("file", "metadata")
METADATA = {  # what is known of a graph -> whether a value of it is valid, and what is
    "architecture": (lambda value: is_text(value) and value.isidentifier(), "the name of a class"),
    "packages": (lambda value: isinstance(value, dict) and all(map(is_text, value.values())), "versions by package"),
    "export_config": (lambda value: isinstance(value, dict), "options"),
    "export_dtype": (lambda value: value in DTYPES, f"one of {', '.join(DTYPES)}"),
    "export_device": (lambda value: value == "cpu", "'cpu'"),
    "kwargs": (lambda value: isinstance(value, dict) and all(map(is_input, value.values())), "inputs by name"),
    "in_spec": (is_text, "a text"),
    "out_spec": (is_text, "a text"),
    "in_constants": (
        lambda value: (
            isinstance(value, dict)
            and all(isinstance(each, bool | int | float | str | None) for each in value.values())
        ),
        "values by name",
    ),
    "out_constants": (
        lambda value: isinstance(value, list) and all(map(is_constant, value)),
        "pairs of a number and null",
    ),
}


def read_description(stored: object) -> tuple[str, dict[str, Any]]:
    """Return the engine of an export, and what is known of each graph."""
    from transformers.exporters.metadata import ExportMetadata

    stored = check_keys(stored, set(DESCRIPTION), "the file", DESCRIPTION)
    expect(stored["schema_version"] == 1, "schema_version", stored["schema_version"], "1")
    engine, graphs = stored["export_format"], stored["components"]
    expect(is_text(engine) and engine in ENGINES, "export_format", engine, f"one of {', '.join(ENGINES)}")
    graphs, found = check_keys(graphs, {SINGLE, ENCODER, DECODER}, "components"), {}
    known = {field.name for field in dataclasses.fields(ExportMetadata)} | METADATA.keys()  # those of later versions
    for name, entry in graphs.items():
        entry = check_keys(entry, set(COMPONENT), name, COMPONENT)
        file = ENGINES[engine].files(name)[0]
        expect(entry["file"] == file, f"the file of {name}", entry["file"], repr(file))
        values = check_keys(entry["metadata"], known, f"the metadata of {name}", tuple(METADATA))
        for field, (is_valid, wanted) in METADATA.items():
            expect(is_valid(values[field]), f"{field} of {name}", values[field], wanted)
        names = list(values["kwargs"])
        expect(input_names(values["in_spec"]) == names, f"kwargs of {name}", names, "the names of in_spec")
        found[name] = ExportMetadata(**{field: values[field] for field in METADATA})
    return engine, found


def fitted(metadata: Any, inputs: Sequence[Port], outputs: Sequence[Port]) -> Any:
    """Return what is known of a graph, without types that PyTorch would import.

    Raises:
        ValueError: if it does not fit the graph.
    """
    kwargs, constants = metadata.kwargs, [number for number, _ in metadata.out_constants]
    expect(
        kwargs.keys() >= metadata.in_constants.keys(), "in_constants", list(metadata.in_constants), "names of inputs"
    )
    for port in inputs:
        name = port.names[0].removeprefix("input.").partition(".")[0]
        is_known = name in kwargs and name not in metadata.in_constants
        expect(is_known, "kwargs", list(kwargs), f"one that names {name}, an input of the graph")
        rank = kwargs[name].get("rank", len(port.shape))
        expect(rank == len(port.shape), f"the rank of {name}", rank, f"{len(port.shape)}, as in the graph")
    total = len(outputs) + len(constants)
    valid = len(set(constants)) == len(constants) and all(is_index(number, total) for number in constants)
    expect(valid, "out_constants", metadata.out_constants, f"numbers below {total}")
    tree = output_tree(metadata.out_spec, [port.names for port in outputs], constants)
    return dataclasses.replace(metadata, in_spec=None, out_spec=tree)


def read_configs(folder: Path) -> tuple[PretrainedConfig, GenerationConfig | None]:
    """Return the configs in the folder; code that they name, there or on the Hub, is not loaded."""
    with naming(folder / CONFIG):
        stored = check_keys(stored := read_json(folder, CONFIG), set(stored), "the file", ("model_type",))
        kind = stored["model_type"]
        expect(is_text(kind) and kind in CONFIG_MAPPING, "model_type", kind, "one of transformers' types of models")
        kept = {name: value for name, value in stored.items() if name not in CODE}
        config = CONFIG_MAPPING[kind].from_dict(kept, attn_implementation="eager")
    return config, read_settings(folder)


def read_settings(folder: Path, size: int = MAX_SIZE) -> GenerationConfig | None:
    """Return the settings of `generate` in a folder; None if it has none.

    Args:
        folder: the folder.
        size: of the vocabulary, if it is known.

    Raises:
        DataError: if the file cannot be read, or a setting in it has no valid value.
    """
    if not (folder / GENERATION).exists():
        return None
    with naming(folder / GENERATION):
        return settings_from(read_json(folder, GENERATION), size)


def read_caches(folder: Path) -> list[list[int]]:
    """Return the shapes of the cache of every layer: [heads, width of keys, width of values]; none without a file."""
    if not (folder / CACHES).exists():
        return []
    with naming(folder / CACHES):
        layers = check_keys(read_json(folder, CACHES), {"layers"}, "the file", ("layers",))["layers"]
        valid = isinstance(layers, list) and bool(layers) and all(is_sizes(each) and len(each) == 3 for each in layers)
        expect(valid, "layers", layers, "a list of three sizes a layer")
    return layers


CACHED = re.compile(r"(?:input\.)?\w+\.(?:self_attention_cache\.)?layers\.(\d+)\.(keys|values)")


def check_caches(graph: str, caches: Sequence[Sequence[int]], inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
    """Raise ValueError unless a graph takes and returns caches of these shapes."""
    found = {match.groups(): port.shape for port in inputs for name in port.names if (match := CACHED.fullmatch(name))}
    wanted = {
        (str(layer), part): (None, heads, None, width)
        for layer, (heads, *widths) in enumerate(caches if graph != ENCODER else ())
        for part, width in zip(("keys", "values"), widths, strict=True)
    }
    expect(wanted.keys() == found.keys(), "layers", f"of {len(caches)} layers", f"of {len(found) // 2}, as the graph")
    for key, sizes in wanted.items():
        pairs = zip(sizes, found[key], strict=True)
        fits = all(size == other or None in (size, other) for size, other in pairs)
        expect(fits, f"the {key[1]} of layer {key[0]}", sizes[1::2], f"as in the graph, {list(found[key])}")
    names = {name.removeprefix("output.") for port in outputs for name in port.names}
    for number in range(len(caches) if graph == ENCODER else 0):
        expect({f"key_{number}", f"value_{number}"} <= names, "layers", number, "one that the encoder returns")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise what goes wrong with a file as a DataError that names it."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # of parsers and engines: of any kind
        raise DataError(f"{path} is damaged, or was changed by hand: {first_line(error):.300}: {AGAIN}") from error
