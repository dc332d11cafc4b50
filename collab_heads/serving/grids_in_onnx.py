"""Weights on grids in graphs of ONNX Runtime: the operators that read codes and scales (see `grids_in_graphs`).

Shapes: D outputs, n inputs, K blocks.
"""

import functools
from typing import Any

import numpy as np

from collab_heads.layers.weight_grid import BLOCK, OF_ROWS
from collab_heads.serving.grids_in_graphs import Found, Grids, packed_codes

DOMAIN, WITH_OPERATORS = "com.microsoft", (1, 23)  # of ONNX Runtime: for weights in blocks
SMALLEST = np.finfo(np.float32).tiny  # what tokens of zeros are divided by
STEP, ZERO = np.array(1 / 127, dtype=np.float32), np.array(128, dtype=np.uint8)  # of numbers between -1 and 1
# two codes of three bits, which count from -4, in six bits -> the same in eight bits, where they count from -8
OF_PAIRS = np.array([(pair % 8 + 4) | (pair // 8 + 4) << 4 for pair in range(64)], dtype=np.uint8)


def has_operators() -> bool:
    """Return True if the installed ONNX Runtime has operators that read weights in blocks."""
    import onnxruntime

    return tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= WITH_OPERATORS


def pack_onnx(program: Any, grids: Grids) -> None:
    """Pack the weights of an ONNX graph that lie on grids; all but eight bits in products stay packed in memory.

    The engine multiplies by eight bits only in integers. Where states are to stay as they are, it computes such weights
    once, when it loads the graph.

    Args:
        program: an `onnx_ir.Model`.
        grids: the weights.
    """
    graph, start, made = program.graph, list[Any](), dict[str, OnnxWeight]()
    program.opset_imports.setdefault(DOMAIN, 1)
    for value in tuple(graph.initializers.values()):
        if len(value.const_value.shape) != 2:
            continue
        found = grids.find(value.const_value.numpy(), (way_of(node, index) for node, index in value.uses()))
        if found is None:
            continue
        weight = made.setdefault(found.name, OnnxWeight(graph, found, grids, start))
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
        found: the weight.
        grids: say how products with eight bits are made.
        start: takes nodes of constants, for the beginning of the graph. ONNX Runtime runs them when it loads it.
    """

    def __init__(self, graph: Any, found: Found, grids: Grids, start: list):
        self.graph, self.name, self.grid, self.start = graph, found.name, found.grid, start
        self.in_integers = grids.in_integers
        self.is_of_rows = found.grid.bits == OF_ROWS
        self.outputs, self.inputs = found.grid.codes.shape
        self.integer_products = 0  # that read it

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

        if not (self.is_of_rows or has_operators()):
            return False
        if turns(node):  # a large tied table
            uses = tuple(node.outputs[0].uses())
            are_fed = [self.feed(reader, number, not is_transposed) for reader, number in uses]
            if all(are_fed):
                node.graph.remove(node, safe=True)
            return all(are_fed)
        old = [node]
        if looks_up(node, index) and not is_transposed:
            new = self.rows(node.inputs[1])
        elif index == 1 and is_product(node, is_transposed) and (self.in_integers or not self.is_of_rows):
            bias, adds = bias_of(node, self.outputs)
            old = [*adds, node]
            new = (self.integer_product if self.is_of_rows else self.product)(node.inputs[0], bias)
        elif self.is_of_rows:
            node.replace_input_with(index, self.transposed if is_transposed else self.whole)
            return True
        else:
            return False
        replaced = old[0].outputs, new[-1].outputs
        onnx_ir.convenience.replace_nodes_and_values(node.graph, old[0], old, new, *replaced)
        return True

    def rows(self, indices: Any) -> list:
        """Return the nodes that look up rows [..., n] of the weight."""
        import onnx_ir

        if self.is_of_rows:
            codes, scales = (onnx_ir.node("Gather", [each, indices]) for each in (self.codes, self.scales))
            numbers = onnx_ir.node("Cast", codes.outputs, {"to": 1})
            return [codes, scales, numbers, onnx_ir.node("Mul", [*numbers.outputs, *scales.outputs])]
        axes = {"gather_axis": 0, "quantize_axis": 1}
        inputs, attributes = [self.table, indices, self.scales], {"bits": 4, "block_size": BLOCK, **axes}
        nodes = [onnx_ir.node("GatherBlockQuantized", inputs, attributes, domain=DOMAIN)]
        return nodes if self.inputs % BLOCK == 0 else [*nodes, self.cut(nodes[0].outputs[0])]

    def product(self, states: Any, bias: Any) -> list:
        """Return the node that multiplies states [..., n] by the weight, and adds a bias [D], if there is one."""
        import onnx_ir

        sizes = {"N": self.outputs, "K": self.inputs, "bits": 4, "block_size": BLOCK}
        inputs = [states, self.codes, self.scales, *([None, None, bias] if bias else [])]
        return [onnx_ir.node("MatMulNBits", inputs, sizes, domain=DOMAIN)]

    def integer_product(self, states: Any, bias: Any) -> list:
        """Return the nodes that round states [..., n] to eight bits, and multiply them by the weight as integers.

        Each token is divided by its largest number, [..., 1], before, and multiplied by it after: the engine's own
        operator rounds all of them over one range. Products of the same states round them once, as the engine merges
        equal nodes.
        """
        import onnx_ir

        axes, least = self.shared("integers.axes", np.array([-1])), self.shared("integers.least", np.array(SMALLEST))
        step, zero = self.shared("integers.step", STEP), self.shared("integers.zero", ZERO)
        highest, lowest = (onnx_ir.node(f"Reduce{end}", [states, axes], {"keepdims": 1}) for end in ("Max", "Min"))
        turned = onnx_ir.node("Neg", lowest.outputs)
        size = onnx_ir.node("Max", [*highest.outputs, *turned.outputs, least])
        divided = onnx_ir.node("Div", [states, *size.outputs])
        rounded = onnx_ir.node("QuantizeLinear", [*divided.outputs, step, zero])
        inputs = [*rounded.outputs, self.turned_for_one(), step, self.scale_of_outputs, zero]
        product = onnx_ir.node("MatMulIntegerToFloat", inputs, domain=DOMAIN)
        nodes = [highest, lowest, turned, size, divided, rounded, product]
        nodes.append(onnx_ir.node("Mul", [*product.outputs, *size.outputs]))
        return [*nodes, onnx_ir.node("Add", [*nodes[-1].outputs, bias])] if bias else nodes

    @functools.cached_property
    def codes(self) -> Any:
        """[D, K, 16], uint8, four bits each; with eight bits [D, n], int8."""
        if self.grid.bits == 3:
            return self.widened()
        return self.constant("codes", self.grid.codes.numpy() if self.is_of_rows else packed_codes(self.grid))

    def widened(self) -> Any:
        """Return codes of three bits as those of four: each two, of six bits together, are looked up."""
        groups = self.constant("codes", self.grid.packed().unflatten(1, (-1, 3)).numpy())  # [D, eight codes each, 3]
        first, second, third = (
            self.computed("Gather", groups, self.constant(f"byte{place}", np.array([place])), axis=-1)
            for place in range(3)
        )
        pairs = [
            self.masked(first, 63),
            self.computed("BitwiseOr", self.shifted(first, 6), self.shifted(self.masked(second, 15), 2, "LEFT")),
            self.computed("BitwiseOr", self.shifted(second, 4), self.shifted(self.masked(third, 3), 4, "LEFT")),
            self.shifted(third, 2),
        ]
        places = self.computed("Cast", self.computed("Concat", *pairs, axis=-1), to=6)  # int32
        found = self.computed("Gather", self.constant("of_pairs", OF_PAIRS), places, axis=0)
        return self.computed("Reshape", found, self.constant("blocks", np.array([self.outputs, -1, BLOCK // 2])))

    def masked(self, numbers: Any, mask: int) -> Any:
        return self.computed("BitwiseAnd", numbers, self.constant(f"mask{mask}", np.array(mask, dtype=np.uint8)))

    def shifted(self, numbers: Any, count: int, direction: str = "RIGHT") -> Any:
        by = self.constant(f"shift{count}", np.array(count, dtype=np.uint8))
        return self.computed("BitShift", numbers, by, direction=direction)

    @functools.cached_property
    def turned(self) -> Any:
        """Codes of eight bits as [n, D]."""
        return self.computed("Transpose", self.codes, perm=[1, 0])

    def turned_for_one(self) -> Any:
        """Return codes of eight bits as [n, D] that no other product reads.

        Where sums overflow, the engine (1.31) turns the weight of every product into unsigned numbers, under a name
        made of the weight's: it loads no graph with two products of one weight. A slice that leaves all in it is one
        for each product, as their ends differ, and is computed when the graph is loaded.
        """
        self.integer_products += 1
        if self.integer_products == 1:
            return self.turned
        start, end = self.constant("start", np.array([0])), np.array([self.inputs + self.integer_products])
        return self.computed("Slice", self.turned, start, self.constant(f"end{self.integer_products}", end))

    @functools.cached_property
    def scale_of_outputs(self) -> Any:
        """[D], float32; with eight bits."""
        return self.computed("Reshape", self.scales, self.constant("outputs", np.array([-1])))

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
        return self.computed("Mul", self.computed("Cast", self.turned, to=1), self.scale_of_outputs)

    @functools.cached_property
    def whole(self) -> Any:
        """[D, n], float32, from codes of eight bits."""
        return self.computed("Mul", self.computed("Cast", self.codes, to=1), self.scales)

    def cut(self, values: Any) -> Any:
        """Return the node that removes from rows what fills up the last block."""
        import onnx_ir

        places = {"begin": 0, "end": self.inputs, "axis": -1}
        inputs = [values, *(self.constant(name, np.array([place])) for name, place in places.items())]
        return onnx_ir.node("Slice", inputs)

    def computed(self, operator: str, *inputs: Any, **attributes: Any) -> Any:
        """Return what a node of the beginning computes."""
        import onnx_ir

        self.start.append(onnx_ir.node(operator, inputs, attributes))
        return self.start[-1].outputs[0]

    def constant(self, name: str, numbers: np.ndarray) -> Any:
        """Return numbers of this weight that the file stores; those of one name are the same."""
        return self.shared(f"{self.name}.{name}", numbers)

    def shared(self, name: str, numbers: np.ndarray) -> Any:
        """Return numbers of all weights that the file stores, the same."""
        import onnx_ir

        if name not in self.graph.initializers:
            shape, tensor = onnx_ir.Shape(numbers.shape), onnx_ir.tensor(numbers, name=name)
            self.graph.register_initializer(onnx_ir.Value(name=name, const_value=tensor, shape=shape))
        return self.graph.initializers[name]


def way_of(node: Any, index: int) -> bool | None:
    """Return whether a node multiplies by a weight as [n, D]; None if it reads it in a way of its own.

    It may also look up rows, or multiply by the weight as [D, n].
    """
    if turns(node):
        ways = {way_of(reader, number) for reader, number in node.outputs[0].uses()}
        way = ways.pop() if len(ways) == 1 else None
        return None if way is None else not way
    if looks_up(node, index):
        return False
    found = [way for way in (True, False) if index == 1 and is_product(node, way)]
    return found[0] if found else None


def turns(node: Any) -> bool:
    """Return True if a node transposes a matrix."""
    return node.op_type == "Transpose" and [*node.attributes.get_ints("perm", ())] == [1, 0]


def looks_up(node: Any, index: int) -> bool:
    """Return True if a node looks up rows of its input."""
    return node.op_type == "Gather" and index == 0 and node.attributes.get_int("axis", 0) == 0


def bias_of(node: Any, size: int) -> tuple[Any, list]:
    """Return the bias that is added to a product, or None, and the node that adds it, if it is another one."""
    if node.op_type == "Gemm":
        return (node.inputs[2] if len(node.inputs) > 2 else None), []
    uses = tuple(node.outputs[0].uses())
    if len(uses) == 1 and uses[0].node.op_type == "Add" and not node.outputs[0].is_graph_output():
        bias = uses[0].node.inputs[1 - uses[0].idx]
        if bias.is_initializer() and [*bias.const_value.shape] == [size]:
            return bias, [uses[0].node]
    return None, []


def is_product(node: Any, is_transposed: bool) -> bool:
    """Return True if a node multiplies states [..., n] by the weight as [n, D], and adds nothing but a bias."""
    if node.op_type == "MatMul":
        return is_transposed
    value, bias = (node.attributes.get_int, node.attributes.get_float), node.inputs[2:]
    return (
        node.op_type == "Gemm"
        and not (bias and bias[0] is not None and (bias[0].shape is None or len(bias[0].shape) != 1))
        and value[0]("transB", 0) == (not is_transposed)
        and not value[0]("transA", 0)
        and value[1]("alpha", 1.0) == value[1]("beta", 1.0) == 1.0
    )
