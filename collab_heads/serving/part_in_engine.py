"""Run a part of a model in an engine, with the operators that `export` gives it there, to time it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from collab_heads.base.extras import check_extra
from collab_heads.base.option_values import Engine, ExportTarget
from collab_heads.errors import ModelStateError, UnsupportedModelError
from collab_heads.serving.fusions_in_onnx import keep_additions_apart
from collab_heads.serving.graph_engines import ENGINES as GRAPHS
from collab_heads.serving.grids_in_graphs import Grids, pack_openvino
from collab_heads.serving.grids_in_onnx import pack_onnx
from collab_heads.serving.target import quiet, why


class EngineForParts(ABC):
    """An engine that runs a part of a model.

    Attributes:
        name: its name in `engine=`.
        target: the target of `export` that it runs.
    """

    name: ClassVar[Engine]
    target: ClassVar[ExportTarget]

    @abstractmethod
    def graph(self, part: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
        """Return the graph of a part, for inputs of these sizes."""

    @abstractmethod
    def run(self, graph: Any, inputs: tuple[Tensor, ...], grids: Grids) -> Callable[[], object]:
        """Return what runs a graph, which stays as it is, with packed weights."""


class OnnxRuntime(EngineForParts):
    """ONNX Runtime."""

    name, target = "onnxruntime", "onnx"

    def graph(self, part, inputs):
        program = torch.onnx.export(part, inputs, dynamo=True, verbose=False)
        assert program is not None
        return program.model_proto

    def run(self, graph, inputs, grids):
        import onnx_ir
        import onnxruntime

        program = onnx_ir.from_proto(graph)
        pack_onnx(program, grids)
        keep_additions_apart(program)
        options = GRAPHS[self.target].options(torch.get_num_threads())["session_options"]
        session = onnxruntime.InferenceSession(onnx_ir.to_proto(program).SerializeToString(), options)
        read = {each.name: tensor.numpy() for each, tensor in zip(session.get_inputs(), inputs, strict=True)}
        return lambda: session.run(None, read)


class OpenVino(EngineForParts):
    """OpenVINO."""

    name, target = "openvino", "openvino"

    def graph(self, part, inputs):
        import openvino

        return openvino.convert_model(torch.export.export(part, inputs))

    def run(self, graph, inputs, grids):
        import openvino

        program = graph.clone()
        pack_openvino(program, grids)
        options = GRAPHS[self.target].options(torch.get_num_threads())["config"]
        request = openvino.Core().compile_model(program, "CPU", options).create_infer_request()
        read = [tensor.numpy() for tensor in inputs]
        return lambda: request.infer(read, share_inputs=True)


ENGINES: dict[str, EngineForParts] = {each.name: each for each in (OnnxRuntime(), OpenVino())}


def check_engine(engine: str, model: nn.Module) -> None:
    """Raise an error if an engine is not installed, or is none for the weights of a model; "torch" always is one."""
    if engine not in ENGINES:
        return
    check_extra(ENGINES[engine].target, f"times in {engine}")
    kinds = {f"{each.dtype} on {each.device.type}" for each in model.parameters()} - {"torch.float32 on cpu"}
    if kinds:
        raise ModelStateError(
            f"engine={engine!r}: the model has weights in {', '.join(sorted(kinds))}, and times are those of float32: "
            "load it with dtype=torch.float32, on the CPU"
        )


class Part(nn.Module):
    """A module to be exported: it calls a function of tensors, and holds the modules that this calls."""

    def __init__(self, function: Callable[..., object], modules: Iterable[nn.Module]):
        super().__init__()
        self.function, self.called = function, nn.ModuleList(dict.fromkeys(modules))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def in_engine(
    engine: str,
    function: Callable[..., object],
    modules: Collection[nn.Module],
    inputs: Sequence[Tensor],
    bits: Iterable[int | None],
) -> list[Callable[[], object]]:
    """Return what runs a function once in an engine, on as many threads as PyTorch has.

    Args:
        engine: one of `ENGINES`.
        function: takes the inputs, and returns tensors.
        modules: the modules that it calls, in evaluation mode.
        inputs: tensors on the CPU.
        bits: to which weights are rounded; products with 8 bits are of integers. None for float.

    Returns:
        One for each of the bits.

    Raises:
        UnsupportedModelError: if the engine does not run it.
    """
    part, runs = Part(function, modules).eval(), ENGINES[engine]
    try:
        with quiet(), torch.no_grad():
            graph = runs.graph(part, tuple(inputs))
            return [runs.run(graph, tuple(inputs), Grids(part, each)) for each in bits]
    except Exception as error:
        name = type(next(iter(modules), part)).__name__
        raise UnsupportedModelError(f"{engine} cannot run {name} by itself: {why(error)}") from error


def empty_run(engine: str) -> Callable[[], object]:
    """Return what runs a graph that does next to nothing, in which a call costs what every call does."""
    (run,) = in_engine(engine, lambda number: number + 1, (), (torch.zeros(1),), (None,))
    return run
