"""The engines that run exported graphs: the files of a graph, what is checked before one is read, its ports."""

import xml.etree.ElementTree
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from collab_heads.errors import DataError
from collab_heads.files.reading import check_file
from collab_heads.serving.graph_interface import input_tree, output_paths
from collab_heads.sites.state import expect

AGAIN = "export the model again"
EXACT = "session.x64quantprecision", "1"  # of ONNX Runtime, where sums overflow
PROCESSORS = Path("/proc/cpuinfo")


def sums_overflow() -> bool:
    """Return True unless the processor is known to have VNNI: others add products of eight bits in 16.

    With VNNI sums are exact as they are, and ONNX Runtime's other way to be exact would do without it.
    """
    text = PROCESSORS.read_text() if PROCESSORS.exists() else ""
    return not {"avx512_vnni", "avx_vnni"} & set(text.split())


class Port(NamedTuple):
    """An input or an output of a graph: its names, and its shape, with None for each size that may differ."""

    names: Sequence[str]
    shape: Sequence[int | None]


class GraphEngine(ABC):
    """An engine that runs graphs.

    Attributes:
        names: of the files of a graph, the graph itself first, then its weights.
    """

    names: ClassVar[tuple[str, ...]]

    def files(self, graph: str) -> tuple[str, ...]:
        """Return the names of the files of a graph."""
        return tuple(name.format(graph) for name in self.names)

    @abstractmethod
    def check(self, path: Path, weights: set[str]) -> None:
        """Raise an error unless a file is a whole graph of this engine.

        Args:
            path: the file.
            weights: the names of the files that weights may stand in.
        """

    @abstractmethod
    def ports(self, program: Any, metadata: Any) -> tuple[list[Port], list[Port]]:
        """Return the inputs and the outputs of a graph, of which `metadata` is what the export says."""

    def input_tree(self, metadata: Any) -> str | None:
        """Return the description of the inputs that the engine needs to be called; most take inputs by name."""
        return None

    def limits(self, program: Any, metadata: Any) -> dict[str, tuple[int, ...]]:
        """Return the largest shape of each input, by name, of an engine that plans its memory when it exports."""
        return {}

    @abstractmethod
    def options(self, threads: int | None) -> dict[str, Any]:
        """Return the options with which a graph is loaded, for a number of threads or for all cores."""


class OnnxRuntime(GraphEngine):
    """ONNX Runtime."""

    names = ("{}.onnx", "{}.onnx.data")

    def check(self, path, weights):
        """Check that the tensors of a graph are in it, or in the files beside it."""
        import onnx

        check_inside(path)
        model, ends = onnx.load(str(path), load_external_data=False), dict[str, int]()
        expect(len(model.graph.output) > 0, "the number of outputs", 0, "more: the file is empty, or no ONNX graph")
        for each in messages(model):
            if isinstance(each, onnx.TensorProto) and (
                place := {entry.key: entry.value for entry in each.external_data}
            ):
                end = int(place.get("offset", 0)) + int(place.get("length", 0))
                ends[place["location"]] = max(end, ends.get(place["location"], 0))
        for name, end in ends.items():
            expect(name in weights, "a file of weights", name, f"one of {', '.join(sorted(weights))}")
            file = path.with_name(name)
            check_inside(file)
            check_size(file, end)

    def ports(self, program, metadata):
        def size(dim: Any) -> int | None:
            return int(str(dim)) if str(dim).isdecimal() else None  # some have the number as the name of a size

        def port(value: Any) -> Port:
            return Port([value.name], [size(getattr(dim, "value", dim)) for dim in value.shape])

        return [port(value) for value in program.graph.inputs], [port(value) for value in program.graph.outputs]

    def options(self, threads):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        if sums_overflow():
            options.add_session_config_entry(*EXACT)
        return {"session_options": options}


class OpenVino(GraphEngine):
    """OpenVINO, computing in float32, of which it takes less by default."""

    names = ("openvino_{}.xml", "openvino_{}.bin")

    def check(self, path, weights):
        check_inside(path)
        check_inside(path.with_suffix(".bin"))
        _, root = next(xml.etree.ElementTree.iterparse(path, events=["start"]))
        expect(root.tag == "net", "the first element", root.tag, "'net'")

    def ports(self, program, metadata):
        def port(value: Any) -> Port:
            shape = value.get_partial_shape()
            return Port(sorted(value.get_names()), [dim.get_length() if dim.is_static else None for dim in shape])

        return [port(value) for value in program.inputs], [port(value) for value in program.outputs]

    def options(self, threads):
        counted = {} if threads is None else {"INFERENCE_NUM_THREADS": threads}
        return {"config": {"INFERENCE_PRECISION_HINT": "f32", **counted}}


class ExecuTorch(GraphEngine):
    """ExecuTorch. A program knows its inputs by their order, so what the export says of them is used, and checked."""

    names = ("{}.pte",)
    mark = b"ET12eh00"  # of a program, and of its header, with the places of its parts

    def check(self, path, weights):
        check_inside(path)
        with path.open("rb") as file:
            begin = file.read(40)
        expect(begin[4:12] == self.mark, "the mark", begin[4:12], "that of ExecuTorch")
        place, size = (int.from_bytes(begin[at : at + 8], "little") for at in (24, 32))
        check_size(path, place + size)

    def ports(self, program, metadata):
        expect("forward" in program.method_names, "the methods", sorted(program.method_names), "'forward'")
        method, names = program.metadata("forward"), list(metadata.kwargs)
        expect(method.num_inputs() == len(names), "kwargs", names, f"{method.num_inputs()} names, as the program takes")
        gone = {number for number, _ in metadata.out_constants}
        paths = [path for number, path in enumerate(output_paths(metadata.out_spec)) if number not in gone]
        expect(method.num_outputs() == len(paths), "the outputs", paths, f"{method.num_outputs()}, as of the program")
        shapes = [method.output_tensor_meta(number).sizes() for number in range(len(paths))]
        inputs = [
            Port([name], [None] * len(method.input_tensor_meta(number).sizes()))
            for number, name in enumerate(names)
            if name not in metadata.in_constants
        ]
        # sizes are the largest; the last is the number of features
        outputs = [
            Port([path], [*[None] * (len(shape) - 1), *shape[-1:]]) for path, shape in zip(paths, shapes, strict=True)
        ]
        return inputs, outputs

    def input_tree(self, metadata):
        fixed = metadata.in_constants.keys()
        for name, described in metadata.kwargs.items():
            expect("rank" in described or name in fixed, f"the input {name}", described, "a tensor")
        return input_tree(list(metadata.kwargs))

    def limits(self, program, metadata):
        method = program.metadata("forward")
        return {
            name: tuple(method.input_tensor_meta(number).sizes())
            for number, name in enumerate(metadata.kwargs)
            if name not in metadata.in_constants  # which are no tensors
        }

    def options(self, threads):
        """Set the threads, which all programs of the process share."""
        from executorch.extension.pybindings import portable_lib

        if threads is not None:
            portable_lib._unsafe_reset_threadpool(threads)
        return {}


# what `load_exported` loads
ENGINES: Mapping[str, GraphEngine] = {
    "onnx": OnnxRuntime(),
    "openvino": OpenVino(),
    "executorch": ExecuTorch(),
}


def check_inside(path: Path) -> None:
    """Raise DataError unless a path leads to a file in its folder; the Hub's cache keeps files in one beside it."""
    if not path.exists():
        raise DataError(f"{path}: no such file: {AGAIN}")
    check_file(path)
    folder, file = path.parent.resolve(), path.resolve()
    blobs = folder.parents[1] / "blobs" if folder.parent.name == "snapshots" else folder
    if not (file.is_relative_to(folder) or file.is_relative_to(blobs)):
        raise DataError(f"{path} leads out of the folder, to {file}: put the file itself there")


def check_size(file: Path, end: int) -> None:
    """Raise DataError unless a file reaches as far as it is read."""
    if (size := file.stat().st_size) < end:
        raise DataError(f"{file} is damaged: it has {size:,} bytes, and the graph reads {end:,}: {AGAIN}")


def messages(message: Any) -> Iterator[Any]:
    """Yield a protobuf message and all messages in it."""
    yield message
    for _, value in message.ListFields():
        for each in [value] if hasattr(value, "ListFields") else value if hasattr(value, "add") else ():
            yield from messages(each)
