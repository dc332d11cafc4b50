"""Weights on grids stay packed in the graphs of engines: codes of few bits and half-precision scales.

An exporter writes floating-point numbers, some of them transposed and under names of its own. So a weight is found by
its content. What takes its place computes the same numbers, so outputs equal those of PyTorch to rounding. A code of
three bits takes four there, since engines read codes of four and eight bits.

Shapes: D outputs, n inputs, K blocks of 32.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from collab_heads.base.checks import shortened
from collab_heads.layers.layout import weight_of
from collab_heads.layers.weight_grid import BLOCK, GridWeights, on_grid

DOMAIN, WITH_OPERATORS = "com.microsoft", (1, 23)  # of ONNX Runtime: its tables of eight bits came last
DYNAMIC_QUANTISATION = "DYNAMIC_QUANTIZATION_GROUP_SIZE"  # of OpenVINO


class Found(NamedTuple):
    """A weight on a grid: the name of its module, the weight, and whether numbers hold it as [n, D]."""

    name: str
    grid: GridWeights
    is_transposed: bool


class Grids:
    """The weights of a model that lie on grids, to be found in graphs by their content; equal ones count once.

    Args:
        model: the model.

    Attributes:
        packed: the names of those that were packed.
        in_float: the names of those that are, or also are, in a graph in floating point.
    """

    def __init__(self, model: nn.Module):
        self.by_content: dict[tuple, Found] = {}
        self.bits: dict[str, int] = {}
        self.left: list[str] = []
        self.packed, self.in_float = set[str](), set[str]()
        for name, module, grid in on_grid(model):
            if grid is None:
                self.left.append(name)
                continue
            weight = weight_of(module).detach().cpu().numpy()
            if content_of(weight) in self.by_content:
                continue
            self.bits[name] = grid.bits
            stored = dataclasses.replace(grid, bits=max(grid.bits, 4))
            self.by_content[content_of(weight.T)] = Found(name, stored, True)
            self.by_content[content_of(weight)] = Found(name, stored, False)
        self.shapes = {key[0] for key in self.by_content}

    def find(self, numbers: np.ndarray) -> Found | None:
        """Return the weight that these numbers are; None if they are none."""
        is_candidate = numbers.shape in self.shapes and numbers.dtype == np.float32
        return self.by_content.get(content_of(numbers)) if is_candidate else None

    def notes(self) -> Iterator[str]:
        """Yield what a user should know of an export."""
        if self.bits:
            counts = {bits: sum(self.bits[name] == bits for name in self.packed) for bits in (8, 4, 3)}
            each = ", ".join(f"{count} of {bits} bits" for bits, count in counts.items() if count)
            wider = ", which take 4 there" if counts[3] else ""
            yield f"{len(self.packed)} of {len(self.bits)} weights on grids are packed{f': {each}{wider}' * bool(each)}"
        if self.in_float:
            names = shortened(sorted(self.in_float), 3)
            yield f"in floating point, as the installed engine has no operator for what reads them: {names}"
        if absent := self.bits.keys() - self.packed - self.in_float:
            yield f"left out or changed by the exporter: {shortened(sorted(absent), 3)}"
        if self.left:
            yield f"in floating point, as they have left their grids: {shortened(self.left, 3)}"


def content_of(numbers: np.ndarray) -> tuple:
    """Return what equal numbers have in common: their shape and a digest."""
    return numbers.shape, hashlib.sha256(np.ascontiguousarray(numbers).data).digest()


def packed_codes(grid: GridWeights) -> np.ndarray:
    """Return packed codes as [D, K, bytes of a block], uint8; a code counts from the smallest one."""
    return grid.packed().unflatten(1, (grid.scales.shape[1], -1)).numpy()


def has_operators() -> bool:
    """Return True if the installed ONNX Runtime has operators that read weights on grids."""
    import onnxruntime

    return tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= WITH_OPERATORS


def pack_onnx(program: Any, grids: Grids) -> None:
    """Pack the weights of an ONNX graph that lie on grids; tables, and products with four bits, stay packed in memory.

    The operator for products reads eight bits slowly: it computes all weights again in every call (seen: 10 times as
    long as in floating point, for 16 tokens). So weights of eight bits are computed once, when the graph is loaded.

    Args:
        program: an `onnx_ir.Model`.
        grids: the weights.
    """
    graph, start, made = program.graph, list[Any](), dict[str, OnnxWeight]()
    program.opset_imports.setdefault(DOMAIN, 1)
    for value in tuple(graph.initializers.values()):
        found = grids.find(value.const_value.numpy()) if len(value.const_value.shape) == 2 else None
        if found is None:
            continue
        weight = made.setdefault(found.name, OnnxWeight(graph, found.name, found.grid, start))
        for node, index in tuple(value.uses()):
            is_packed = weight.feed(node, index, found.is_transposed)
            (grids.packed if is_packed else grids.in_float).add(found.name)
        if not value.uses():
            del graph.initializers[value.name]
    graph.insert_before(graph[0], start)


class OnnxWeight:
    """A weight on a grid in an ONNX graph: codes and scales, stored once, and the nodes that read them.

    Args:
        graph: the graph.
        name: the name of its module.
        grid: the weight.
        start: takes nodes of constants, for the beginning of the graph. ONNX Runtime runs them when it loads it.
    """

    def __init__(self, graph: Any, name: str, grid: GridWeights, start: list):
        self.graph, self.name, self.grid, self.start = graph, name, grid, start
        self.outputs, self.inputs = grid.codes.shape

    def feed(self, node: Any, index: int, is_transposed: bool) -> bool:
        """Let a node read codes and scales, or eight bits as numbers that are computed when the graph is loaded.

        Args:
            node: the node.
            index: of the input that is the weight.
            is_transposed: whether it reads the weight as [n, D].

        Returns:
            True if it can; if not, it is left as it is.
        """
        import onnx_ir

        if node.op_type == "Transpose" and [*node.attributes.get_ints("perm", ())] == [1, 0]:  # of a large tied table
            uses = tuple(node.outputs[0].uses())
            are_fed = [self.feed(reader, number, not is_transposed) for reader, number in uses]
            if all(are_fed):
                node.graph.remove(node, safe=True)
            return all(are_fed)
        if node.op_type == "Gather" and index == 0 and not is_transposed and node.attributes.get_int("axis", 0) == 0:
            new = self.rows(node.inputs[1])
        elif self.grid.bits == 4 and index == 1 and is_product(node, is_transposed):
            new = [self.product(node)]
        elif self.grid.bits == 8:
            node.replace_input_with(index, self.transposed if is_transposed else self.whole)
            return True
        else:
            return False
        replaced = node.outputs, new[-1].outputs
        onnx_ir.convenience.replace_nodes_and_values(node.graph, node, [node], new, *replaced)
        return True

    def rows(self, indices: Any) -> list:
        """Return the nodes that look up rows [..., n] of the weight."""
        import onnx_ir

        axes = {"gather_axis": 0, "quantize_axis": 1}
        inputs, attributes = [self.table, indices, self.scales], {"bits": self.grid.bits, "block_size": BLOCK, **axes}
        nodes = [onnx_ir.node("GatherBlockQuantized", inputs, attributes, domain=DOMAIN)]
        return nodes if self.inputs % BLOCK == 0 else [*nodes, self.cut(nodes[0].outputs[0], -1)]

    def product(self, node: Any) -> Any:
        """Return the node that multiplies states [..., n] by the weight; the bias is that of a Gemm."""
        import onnx_ir

        sizes = {"N": self.outputs, "K": self.inputs, "bits": self.grid.bits, "block_size": BLOCK}
        bias = [None, None, *node.inputs[2:]] if len(node.inputs) > 2 else []
        inputs = [node.inputs[0], self.codes, self.scales, *bias]
        return onnx_ir.node("MatMulNBits", inputs, sizes, domain=DOMAIN)

    @functools.cached_property
    def codes(self) -> Any:
        """[D, K, bytes of a block], uint8."""
        return self.constant("codes", packed_codes(self.grid))

    @functools.cached_property
    def scales(self) -> Any:
        """[D, K], of half precision in the file, and float32 for the operators."""
        return self.computed("Cast", self.constant("scales", self.grid.scales.numpy()), to=1)

    @functools.cached_property
    def table(self) -> Any:
        """The codes as [D, bytes of a row]."""
        return self.computed("Reshape", self.codes, self.constant("row", np.array([self.outputs, -1])))

    @functools.cached_property
    def transposed(self) -> Any:
        """[n, D], float32, from codes of eight bits, transposed while they are small: the engine keeps every step."""
        codes, axis = self.computed("Transpose", self.codes, perm=[1, 2, 0]), self.constant("axis", np.array([1]))
        scales = self.computed("Unsqueeze", self.computed("Transpose", self.scales, perm=[1, 0]), axis)  # [K, 1, D]
        middle = self.constant("middle", np.array(128, dtype=np.float32))
        weight = self.computed("Mul", self.computed("Sub", self.computed("Cast", codes, to=1), middle), scales)
        weight = self.computed("Reshape", weight, self.constant("column", np.array([-1, self.outputs])))
        if self.inputs % BLOCK:
            self.start.append(self.cut(weight, 0))
            weight = self.start[-1].outputs[0]
        return weight

    @functools.cached_property
    def whole(self) -> Any:
        """[D, n]."""
        return self.computed("Transpose", self.transposed, perm=[1, 0])

    def cut(self, values: Any, axis: int) -> Any:
        """Return the node that removes what fills up the last block along an axis."""
        import onnx_ir

        places = {"begin": 0, "end": self.inputs, f"axis{axis}": axis}
        inputs = [values, *(self.constant(name, np.array([place])) for name, place in places.items())]
        return onnx_ir.node("Slice", inputs)

    def computed(self, operator: str, *inputs: Any, **attributes: Any) -> Any:
        """Return what a node of the beginning computes."""
        import onnx_ir

        self.start.append(onnx_ir.node(operator, inputs, attributes))
        return self.start[-1].outputs[0]

    def constant(self, name: str, numbers: np.ndarray) -> Any:
        """Return numbers that the file stores; those of one name are the same."""
        import onnx_ir

        name = f"{self.name}.{name}"
        if name not in self.graph.initializers:
            shape, tensor = onnx_ir.Shape(numbers.shape), onnx_ir.tensor(numbers, name=name)
            self.graph.register_initializer(onnx_ir.Value(name=name, const_value=tensor, shape=shape))
        return self.graph.initializers[name]


def is_product(node: Any, is_transposed: bool) -> bool:
    """Return True if a node multiplies states [..., n] by the weight as [n, D], and adds nothing but a bias."""
    if node.op_type == "MatMul":
        return is_transposed
    value = node.attributes.get_int, node.attributes.get_float
    return (
        node.op_type == "Gemm"
        and value[0]("transB", 0) == (not is_transposed)
        and not value[0]("transA", 0)
        and value[1]("alpha", 1.0) == value[1]("beta", 1.0) == 1.0
    )


def pack_openvino(program: Any, grids: Grids) -> None:
    """Pack the weights of an OpenVINO graph that lie on grids, in the form that NNCF gives compressed weights.

    The engine keeps them packed in memory where n is a multiple of 32; others it computes when it loads the graph. The
    graph asks it to leave states in floating point, which many processors would round to eight bits.

    Args:
        program: an `openvino.Model`.
        grids: the weights.
    """
    program.set_rt_info("0", ["runtime_options", DYNAMIC_QUANTISATION])
    for node in program.get_ops():
        if node.get_type_name() != "Constant" or len(node.get_output_shape(0)) != 2:
            continue
        found = grids.find(node.data)
        if found is None:
            continue
        weight = openvino_weight(found)
        weight.set_friendly_name(node.get_friendly_name())
        for target in node.output(0).get_target_inputs():
            if reads_rows(target, found.is_transposed):
                target.replace_source_output(weight.output(0))
                grids.packed.add(found.name)
            else:
                grids.in_float.add(found.name)


def reads_rows(target: Any, is_transposed: bool) -> bool:
    """Return True if the node of an input looks up rows of the weight, or multiplies states [..., n] by it.

    Where a product runs over D, the engine (2026.4) takes the blocks for those of D, and fails when it loads the graph.
    """
    node, index = target.get_node(), target.get_index()
    if node.get_type_name() == "MatMul":
        return index == 1 and node.get_attributes()["transpose_b"] != is_transposed
    return node.get_type_name() == "Gather" and index == 0 and not is_transposed


def openvino_weight(found: Found) -> Any:
    """Return the node that computes a weight, [D, n] or transposed, float32, from its codes and scales."""
    import openvino
    from openvino import opset13

    codes, (outputs, inputs) = packed_codes(found.grid), found.grid.codes.shape
    kind = openvino.Type.i8 if found.grid.bits == 8 else openvino.Type.i4
    stored = openvino.Tensor(kind, openvino.Shape([*codes.shape[:2], BLOCK]))
    signed = codes ^ (0x80 if found.grid.bits == 8 else 0x88)  # codes count from the smallest: into two's complement
    stored.data.reshape(-1).view(np.uint8)[:] = signed.reshape(-1)
    scales = opset13.constant(found.grid.scales.numpy()[..., None])
    weight = opset13.multiply(opset13.convert(opset13.constant(stored), "f16"), scales)
    weight = opset13.reshape(weight, opset13.constant(np.array([outputs, codes.shape[1] * BLOCK])), False)
    if inputs % BLOCK:
        begin, end, step, axis = (opset13.constant(np.array([place])) for place in (0, inputs, 1, 1))
        weight = opset13.slice(weight, begin, end, step, axis)
    weight = opset13.convert(weight, "f32")
    return opset13.transpose(weight, opset13.constant(np.array([1, 0]))) if found.is_transposed else weight
