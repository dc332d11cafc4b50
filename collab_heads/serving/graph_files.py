"""The files of the graphs in an exported folder, checked before an engine reads them, and what the graphs say."""

import xml.etree.ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from collab_heads.errors import DataError
from collab_heads.files.reading import check_file
from collab_heads.serving.target import first_line
from collab_heads.sites.state import expect

FILES = {"onnx": ("{}.onnx", "{}.onnx.data"), "openvino": ("openvino_{}.xml", "openvino_{}.bin")}  # graph and weights
AGAIN = "export the model again"


class Port(NamedTuple):
    """An input or an output of a graph: its names, and its shape, with None for each size that may differ."""

    names: Sequence[str]
    shape: Sequence[int | None]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise what goes wrong with a file as a DataError that names it."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # of parsers and engines: of any kind
        raise DataError(f"{path} is damaged, or was changed by hand: {first_line(error):.300}: {AGAIN}") from error


def check_inside(path: Path) -> None:
    """Raise DataError unless a path leads to a file in its folder; the Hub's cache keeps files in one beside it."""
    if not path.exists():
        raise DataError(f"{path}: no such file: {AGAIN}")
    check_file(path)
    folder, file = path.parent.resolve(), path.resolve()
    blobs = folder.parents[1] / "blobs" if folder.parent.name == "snapshots" else folder
    if not (file.is_relative_to(folder) or file.is_relative_to(blobs)):
        raise DataError(f"{path} leads out of the folder, to {file}: put the file itself there")


def check_onnx(path: Path, weights: set[str]) -> None:
    """Raise an error unless the tensors of an ONNX graph are in it, or in the files beside it."""
    import onnx

    check_inside(path)
    model, ends = onnx.load(str(path), load_external_data=False), dict[str, int]()
    expect(len(model.graph.output) > 0, "the number of outputs", 0, "more: the file is empty, or no ONNX graph")
    for each in messages(model):
        if isinstance(each, onnx.TensorProto) and (place := {entry.key: entry.value for entry in each.external_data}):
            end = int(place.get("offset", 0)) + int(place.get("length", 0))
            ends[place["location"]] = max(end, ends.get(place["location"], 0))
    for name, end in ends.items():
        expect(name in weights, "a file of weights", name, f"one of {', '.join(sorted(weights))}")
        file = path.with_name(name)
        check_inside(file)
        if (size := file.stat().st_size) < end:
            raise DataError(f"{file} is damaged: it has {size:,} bytes, and the graph reads {end:,}: {AGAIN}")


def messages(message: Any) -> Iterator[Any]:
    """Yield a protobuf message and all messages in it."""
    yield message
    for _, value in message.ListFields():
        for each in [value] if hasattr(value, "ListFields") else value if hasattr(value, "add") else ():
            yield from messages(each)


def check_openvino(path: Path, weights: set[str]) -> None:
    """Raise an error unless a file is a graph of OpenVINO, with its weights beside it."""
    check_inside(path)
    check_inside(path.with_suffix(".bin"))
    _, root = next(xml.etree.ElementTree.iterparse(path, events=["start"]))
    expect(root.tag == "net", "the first element", root.tag, "'net'")


def ports_of_onnx(program: Any) -> tuple[list[Port], list[Port]]:
    """Return the inputs and the outputs of an ONNX graph."""

    def size(dim: Any) -> int | None:
        return int(str(dim)) if str(dim).isdecimal() else None  # some have the number as the name of a size

    def port(value: Any) -> Port:
        return Port([value.name], [size(getattr(dim, "value", dim)) for dim in value.shape])

    return [port(value) for value in program.graph.inputs], [port(value) for value in program.graph.outputs]


def ports_of_openvino(program: Any) -> tuple[list[Port], list[Port]]:
    """Return the inputs and the outputs of an OpenVINO graph."""

    def port(value: Any) -> Port:
        shape = value.get_partial_shape()
        return Port(sorted(value.get_names()), [dim.get_length() if dim.is_static else None for dim in shape])

    return [port(value) for value in program.inputs], [port(value) for value in program.outputs]


CHECKS = {"onnx": check_onnx, "openvino": check_openvino}
PORTS = {"onnx": ports_of_onnx, "openvino": ports_of_openvino}
