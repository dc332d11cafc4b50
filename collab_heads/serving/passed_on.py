"""Leave out the outputs of a graph that are inputs, passed on unchanged.

A decoder with cross-attention returns its whole cache, also the keys and values of the source, which it only reads. To
copy them at every step takes time, and OpenVINO (2026.4) ends the process: it keeps such an output in the memory of the
input, and reads it in the next call, when that memory is freed.
"""

from typing import Any


def without_passed_on(component: Any) -> None:
    """Remove such outputs from an exported graph, in place; where the output was, the graph returns None.

    Args:
        component: a graph with its metadata, as transformers' exporters make it: `openvino.Model` or `onnx_ir.Model`.
    """
    program, metadata = component.program, component.metadata
    outputs, is_passed_on, remove = handles_of(program)
    constants = dict(metadata.out_constants)
    leaves = iter(index for index in range(len(outputs) + len(constants)) if index not in constants)
    for leaf, output in zip(leaves, outputs, strict=True):
        if is_passed_on(output):
            constants[leaf] = None
            remove(output)
    metadata.out_constants = sorted([index, value] for index, value in constants.items())


def handles_of(program: Any) -> tuple[list, Any, Any]:
    """Return the outputs of a graph, whether one is an input, and how it is removed."""
    if hasattr(program, "get_ordered_ops"):  # OpenVINO
        return list(program.outputs), is_parameter, lambda output: program.remove_result(output.get_node())
    graph = program.graph
    return list(graph.outputs), is_input, graph.outputs.remove


def is_parameter(output: Any) -> bool:
    """Return True if an output of an OpenVINO model is an input, maybe converted to the type that it has."""
    node = output.get_node().input_value(0).get_node()
    while node.get_type_name() in ("ConvertLike", "Convert"):
        node = node.input_value(0).get_node()
    return node.get_type_name() == "Parameter"


def is_input(output: Any) -> bool:
    """Return True if an output of an ONNX model is an input."""
    while (node := output.producer()) is not None and node.op_type == "Identity":
        output = node.inputs[0]
    return output.is_graph_input()
