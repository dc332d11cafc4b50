"""The target ExecuTorch: a program for phones and small devices, whose memory is planned for the largest inputs."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

from torch import Tensor
from torch.export import Dim

from collab_heads.base.checks import MAX_SIZE, is_size
from collab_heads.base.option_values import ExportTarget
from collab_heads.errors import ArgumentError, UnsupportedModelError
from collab_heads.layers.weight_grid import on_grid
from collab_heads.running.batches import longest_text
from collab_heads.serving.fixed_cache import LENGTH, FixedCacheDecoder, room_of
from collab_heads.serving.for_graphs import Graph
from collab_heads.serving.grids_in_executorch import in_eight_bits, is_integer

TEXTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")  # [B, T]: other rows have one size
LONGEST = 512  # tokens, where the config has no limit


class ExecuTorch(Graph):
    """ExecuTorch, on processors (its XNNPACK)."""

    name: ClassVar[ExportTarget] = "executorch"
    engine = "executorch"

    def check(self, model, int8, tokenizer):
        super().check(model, int8, tokenizer)
        if model.can_generate():
            check_decoder(model)

    def write(self, model, folder, example, *, tokenizer, int8):
        """Write the program; without `int8` weights on grids are floating-point numbers there."""
        trained = [each for each in model.parameters() if each.requires_grad]
        try:
            with in_eight_bits(model) if int8 else nullcontext(0) as rounded:
                super().write(model, folder, example, tokenizer=tokenizer, int8=False)
        finally:
            for each in trained:  # transformers' exporter takes that from them
                each.requires_grad_(True)
        in_float = [name for name, module, _ in on_grid(model) if not (int8 and is_integer(module))]
        notes = [f"{rounded} weights have eight bits: those of linear maps"] if rounded else []
        return (
            *notes,
            *([f"{len(in_float)} weights on grids are written as floating-point numbers"] if in_float else []),
        )

    def graphs(self, model, example):
        """Export the program; that of a decoder holds its cache."""
        if not model.can_generate():
            return super().graphs(model, example)
        decoder = FixedCacheDecoder(model, room_of(model))
        return self.exporter().export(decoder, decoder.example(), options_for(decoder.sizes())).components, []

    def generation(self, model):
        """Return the generation config, which says how many tokens the cache has room for."""
        config = super().generation(model)
        config.cache_config = {"batch_size": 1, LENGTH: room_of(model)}
        return config

    def exporter(self):
        from transformers.exporters.exporter_executorch import ExecutorchExporter

        return ExecutorchExporter()

    def options(self, model, example):
        """Return the options; without sizes, transformers plans 10 GB for a MiniLM: 256 texts of 512 tokens."""
        return options_for(sizes(model, example))


def options_for(sizes: Mapping[str, Any]) -> Any:
    """Return transformers' options, with how large each input may be."""
    from transformers.exporters.configs import ExecutorchConfig

    return ExecutorchConfig(backend="xnnpack", dynamic=True, dynamic_shapes=dict(sizes))


def check_decoder(model: Any) -> None:
    """Raise UnsupportedModelError unless a model that generates can do so with a cache of one size, from one text."""
    reason = None
    if model.config.is_encoder_decoder:
        reason = "has an encoder, too, and only decoders have a cache of one size here"
    elif model.main_input_name != "input_ids":
        reason = f"generates from {model.main_input_name}, and only texts are read here"
    elif (longest_text(model) or 0) < (getattr(model.config, "max_position_embeddings", None) or 0):
        reason = (
            "counts positions from its padding index on, and transformers' generate from 0: a program knows one way"
        )
    if reason is not None:
        raise UnsupportedModelError(f"executorch: {type(model).__name__} {reason}: choose onnx or openvino")
    room, longest = room_of(model), longest_text(model) or MAX_SIZE
    if not is_size(room) or room > longest:
        raise ArgumentError(
            f"generation_config.cache_config[{LENGTH!r}] is {room!r}: give a number of tokens, up to the {longest} "
            "that the model reads"
        )


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
