"""Keep ONNX Runtime from fusing an addition with what follows it, where both take longer together.

Its `SkipLayerNormalization` adds a residual and normalises, `BiasGelu` adds a bias and activates. On processors (1.31)
the first takes nearly five times as long as an addition and a `LayerNormalization`, in all-MiniLM-L6-v2 a quarter of
the time in eight bits, and the second a quarter longer than its two halves. Both begin with `Add`; a `Sum` of two
computes the same, and is fused with nothing.
"""

from typing import Any

FUSED = ("LayerNormalization", "Gelu")  # with an addition before


def keep_additions_apart(program: Any) -> None:
    """Write additions that would be fused as sums, in place; those of other types than float32 stay.

    Args:
        program: an `onnx_ir.Model`.
    """
    import onnx_ir

    for node in tuple(program.graph):
        if node.op_type != "Add" or node.outputs[0].dtype not in (None, onnx_ir.DataType.FLOAT):
            continue
        value = node.outputs[0]
        if any(reader.op_type in FUSED and index == 0 for reader, index in value.uses()):
            node.op_type = "Sum"
