"""The target ExecuTorch: a program for phones and small devices, whose memory is planned for the largest inputs."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.export import Dim

from collab_heads.base.option_values import ExportTarget
from collab_heads.errors import UnsupportedModelError
from collab_heads.layers.weight_grid import on_grid
from collab_heads.running.batches import longest_text
from collab_heads.serving.for_graphs import Graph

TEXTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")  # [B, T]: other rows have one size
LONGEST = 512  # tokens, where the config has no limit


class ExecuTorch(Graph):
    """ExecuTorch, on processors (its XNNPACK)."""

    name: ClassVar[ExportTarget] = "executorch"
    engine = "executorch"
    has_int8 = False

    def check(self, model, int8, tokenizer):
        super().check(model, int8, tokenizer)
        if model.can_generate():
            raise UnsupportedModelError(
                f"executorch: {type(model).__name__} generates, with a cache that grows, and the memory of a program "
                "is planned when it is written. transformers' recipe, with a cache of one size, runs there (guide PEFT "
                "and export)"
            )

    def write(self, model, folder, example, *, tokenizer, int8):
        """Write the program; weights on grids are floating-point numbers there, since XNNPACK has other grids."""
        super().write(model, folder, example, tokenizer=tokenizer, int8=int8)
        count = len([*on_grid(model)])
        return (f"{count} weights on grids are written as floating-point numbers",) if count else ()

    def exporter(self):
        from transformers.exporters.exporter_executorch import ExecutorchExporter

        return ExecutorchExporter()

    def options(self, model, example):
        """Return the options; without sizes, transformers plans 10 GB for a MiniLM: 256 texts of 512 tokens."""
        from transformers.exporters.configs import ExecutorchConfig

        return ExecutorchConfig(backend="xnnpack", dynamic=True, dynamic_shapes=sizes(model, example))


def sizes(model: Any, example: Mapping[str, Any]) -> dict[str, Any]:
    """Return how large each input may be: as many rows as the example, and as many tokens as the model reads."""
    longest, found = longest_text(model) or LONGEST, dict[str, Any]()
    for name, value in example.items():
        found[name] = None
        if isinstance(value, Tensor) and value.ndim:
            found[name] = {0: Dim.AUTO(min=1, max=len(value))}
            if name in TEXTS:
                found[name][1] = Dim.AUTO(min=1, max=max(longest, value.shape[1]))
    return found
