"""Weights on grids stay packed in the graphs of engines: codes of few bits and half-precision scales.

An exporter writes floating-point numbers, some of them transposed and under names of its own. So a weight is found by
its content. What takes its place computes the same numbers, so outputs equal those of PyTorch to rounding. Engines read
codes of four and eight bits: a code of three bits takes four, but in the file for ONNX Runtime.

"In integers" means that the weights that lie on no grid are rounded to eight bits, and that products with eight bits
are those of integers: the states are rounded to eight bits, too, each token over a range of its own. So the outputs for
a text do not depend on the texts beside it. In language models the first token is often a hundred times as large as
the others, which one range would round to nothing.

Shapes: D outputs, n inputs, K blocks.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from collab_heads.base.checks import shortened
from collab_heads.fitting.weight_grid import nearest_on_grid
from collab_heads.layers.layout import weight_of
from collab_heads.layers.weight_grid import BLOCK, OF_ROWS, GridWeights, on_grid

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
        others: the bits to which other weights are rounded; None leaves them as they are. With 8, products with eight
            bits are of integers.

    Attributes:
        packed: the names of those that were packed.
        in_float: the names of those that are, or also are, in a graph in floating point.
        in_integers: whether products with eight bits are of integers.
        rounded: the number of other weights that were rounded.
    """

    def __init__(self, model: nn.Module, others: int | None = None):
        self.others, self.in_integers, self.rounded = others, others == OF_ROWS, 0
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
            self.add(name, grid, weight)

    def add(self, name: str, grid: GridWeights, weight: np.ndarray) -> None:
        """Take a weight [D, n] that graphs may hold."""
        self.by_content[content_of(weight.T)] = Found(name, grid, True)
        self.by_content[content_of(weight)] = Found(name, grid, False)

    def find(self, numbers: np.ndarray, reads: Iterable[bool | None]) -> Found | None:
        """Return the weight that some numbers are, or are rounded to; None if they are none.

        Args:
            numbers: the numbers of a graph.
            reads: for each node that reads them, whether it multiplies by them as [n, D]; None if it does neither that,
                nor multiply by them as [D, n], nor look up rows.
        """
        if numbers.ndim != 2 or numbers.dtype != np.float32:
            return None
        ways = set(reads)
        found = self.by_content.get(content_of(numbers))
        if found is None and self.others and ways in ({True}, {False}) and min(numbers.shape) >= BLOCK:
            self.rounded += 1
            weight = numbers.T if True in ways else numbers
            grid = nearest_on_grid(torch.tensor(weight), self.others)
            self.add(f"rounded.{self.rounded}", grid, weight)
            found = self.find(numbers, ways)
        return found

    def notes(self) -> Iterator[str]:
        """Yield what a user should know of an export."""
        if self.rounded:
            yield f"weights rounded to {self.others} bits: {self.rounded}"
        if self.bits:
            packed = self.packed & self.bits.keys()
            counts = {bits: sum(self.bits[name] == bits for name in packed) for bits in (8, 4, 3)}
            each = ", ".join(f"{count} of {bits} bits" for bits, count in counts.items() if count)
            wider = ", which the engine reads as 4" if counts[3] else ""
            yield f"{len(packed)} of {len(self.bits)} weights on grids are packed{f': {each}{wider}' * bool(each)}"
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
    """Return codes of four bits, or of three in four, in blocks: [D, K, 16], uint8; a code counts from the smallest."""
    grid = dataclasses.replace(grid, bits=4)
    return grid.packed().unflatten(1, (grid.scales.shape[1], -1)).numpy()


def pack_openvino(program: Any, grids: Grids) -> None:
    """Pack the weights of an OpenVINO graph that lie on grids, in the form that NNCF gives compressed weights.

    The engine keeps them packed in memory where n is a multiple of 32; others it computes when it loads the graph. The
    graph asks it to leave states in floating point, which many processors would round to eight bits, unless products
    are to be of integers.

    Args:
        program: an `openvino.Model`.
        grids: the weights.
    """
    if not grids.in_integers:
        program.set_rt_info("0", ["runtime_options", DYNAMIC_QUANTISATION])
    for node in program.get_ops():
        if node.get_type_name() != "Constant" or len(node.get_output_shape(0)) != 2:
            continue
        readers = [(target.get_node(), target.get_index()) for target in node.output(0).get_target_inputs()]
        found = grids.find(node.data, (openvino_way_of(reader, index) for reader, index in readers))
        if found is None:
            continue
        weight = openvino_weight(found)
        weight.set_friendly_name(node.get_friendly_name())
        for target in node.output(0).get_target_inputs():
            if openvino_way_of(target.get_node(), target.get_index()) is found.is_transposed:
                target.replace_source_output(weight.output(0))
                grids.packed.add(found.name)
            else:
                grids.in_float.add(found.name)


def openvino_way_of(node: Any, index: int) -> bool | None:
    """Return whether a node multiplies by a weight as [n, D]; None if it reads it in a way of its own.

    It may also look up rows, or multiply by the weight as [D, n]. Where a product runs over D, the engine (2026.4)
    takes the blocks for those of D, and fails when it loads the graph.
    """
    if node.get_type_name() == "MatMul":
        return not node.get_attributes()["transpose_b"] if index == 1 else None
    return False if node.get_type_name() == "Gather" and index == 0 else None


def openvino_weight(found: Found) -> Any:
    """Return the node that computes a weight, [D, n] or transposed, float32, from its codes and scales."""
    import openvino
    from openvino import opset13

    scales, (outputs, inputs) = found.grid.scales.numpy(), found.grid.codes.shape
    if found.grid.bits == OF_ROWS:
        codes = opset13.constant(found.grid.codes.numpy())
        weight = opset13.multiply(opset13.convert(codes, "f16"), opset13.constant(scales))
    else:
        packed = packed_codes(found.grid)
        stored = openvino.Tensor(openvino.Type.i4, openvino.Shape([*packed.shape[:2], BLOCK]))
        signed = packed ^ 0x88  # codes count from the smallest: into two's complement
        stored.data.reshape(-1).view(np.uint8)[:] = signed.reshape(-1)
        codes = opset13.convert(opset13.constant(stored), "f16")
        weight = opset13.multiply(codes, opset13.constant(scales[..., None]))
        weight = opset13.reshape(weight, opset13.constant(np.array([outputs, packed.shape[1] * BLOCK])), False)
        if inputs % BLOCK:
            begin, end, step, axis = (opset13.constant(np.array([place])) for place in (0, inputs, 1, 1))
            weight = opset13.slice(weight, begin, end, step, axis)
    weight = opset13.convert(weight, "f32")
    return opset13.transpose(weight, opset13.constant(np.array([1, 0]))) if found.is_transposed else weight
