"""The targets of an export, one class each: how it writes a model, and how what it wrote is loaded."""

import copy
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from collab_heads.base.extras import check_extra
from collab_heads.base.option_values import ExportTarget
from collab_heads.errors import CollabHeadsError, UnsupportedModelError
from collab_heads.heads.fold import fold_heads
from collab_heads.serving.for_ctranslate2 import CTranslate2
from collab_heads.serving.passed_on import without_passed_on
from collab_heads.serving.served_model import (
    CACHES,
    DECODER,
    ENCODER,
    SINGLE,
    CrossAttentionEncoder,
    check_exporters,
    load_exported,
)
from collab_heads.serving.shared_weights import share_weights
from collab_heads.serving.target import Target, quiet, why
from collab_heads.sites.record import FIELD, CollabConfig


class StockCheckpoint(Target):
    """A checkpoint that plain transformers loads, and whatever reads its checkpoints."""

    name = "transformers"

    def write(self, model, folder, example, *, tokenizer, int8):
        """Fold a copy of the model, and save it."""
        copied = copy.deepcopy(model)
        is_changed = CollabConfig.on(model).sites or CollabConfig.on(model).feed_forwards
        notes = (str(fold_heads(copied)),) if is_changed else ()
        copied.save_pretrained(folder)
        return notes

    def load(self, model, folder):
        return type(model).from_pretrained(folder, dtype=model.dtype).eval()


class Graph(Target):
    """A graph that transformers' own exporters make: any size in every layer, a cache where the model generates."""

    def check(self, model, int8):
        super().check(model, int8)
        check_extra(self.name, f"exports to {self.name}")
        check_exporters(f"exports to {self.name}")

    def exporter(self) -> Any:
        """Return transformers' exporter."""

    def options(self, int8: bool) -> Any:
        """Return its options."""

    def finish(self, folder: Path, graphs: Collection[str]) -> None:
        """Finish what was written."""

    def write(self, model, folder, example, *, tokenizer, int8):
        """Export one graph, or those of an encoder and a decoder with their cache."""
        from transformers.exporters.base import ExportedModel

        caches: list[tuple[int, int, int]] = []
        with quiet(), torch.no_grad():
            exporter, options = self.exporter(), self.options(int8)
            try:
                if not model.can_generate():
                    components = exporter.export(model, dict(example), options).components
                else:
                    components, caches = generating(exporter, options, model, example)
            except (CollabHeadsError, OSError):
                raise
            except Exception as error:
                raise UnsupportedModelError(
                    f"transformers' exporter to {self.name} fails on {type(model).__name__}: {why(error)}"
                ) from error
            config = copy.deepcopy(model.config)
            if hasattr(config, FIELD):  # the graph needs nothing of this package
                delattr(config, FIELD)
            generation = model.generation_config if model.can_generate() else None
            ExportedModel(components, exporter.export_format, config, generation).save_pretrained(folder)
            self.finish(folder, components)
        if caches:
            (folder / CACHES).write_text(json.dumps({"layers": caches}), encoding="utf-8")
        return ()

    def load(self, model, folder):
        with quiet():
            return load_exported(folder, threads=1)


class Onnx(Graph):
    """ONNX Runtime."""

    name, has_int8 = "onnx", True

    def exporter(self):
        from transformers.exporters.exporter_onnx import OnnxExporter

        return OnnxExporter()

    def options(self, int8):
        from transformers.exporters.configs import OnnxConfig
        from transformers.exporters.quantizers import OnnxRuntimeDynamicConfig, OnnxRuntimeQuantizer

        quantizer = OnnxRuntimeQuantizer(OnnxRuntimeDynamicConfig()) if int8 else None
        return OnnxConfig(dynamic=True, quantizer=quantizer)

    def finish(self, folder, graphs):
        if DECODER in graphs:
            share_weights(folder, ENCODER, DECODER)


class OpenVino(Graph):
    """OpenVINO."""

    name, has_int8 = "openvino", True

    def check(self, model, int8):
        super().check(model, int8)
        if int8:
            check_extra("openvino-int8", "weights of eight bits in OpenVINO")

    def exporter(self):
        from transformers.exporters.exporter_openvino import OpenVINOExporter

        return OpenVINOExporter()

    def options(self, int8):
        from transformers.exporters.configs import OpenVINOConfig

        quantizer = None
        if int8:
            from transformers.exporters.quantizers import NNCFOpenVINOQuantizer, NNCFWeightCompressionConfig

            quantizer = NNCFOpenVINOQuantizer(NNCFWeightCompressionConfig())  # of weights alone: needs no examples
        return OpenVINOConfig(dynamic=True, stateful=False, quantizer=quantizer)


TARGETS: dict[ExportTarget, Target] = {
    each.name: each for each in (Onnx(), OpenVino(), CTranslate2(), StockCheckpoint())
}


def generating(
    exporter: Any, options: Any, model: Any, example: Mapping
) -> tuple[dict[str, Any], list[tuple[int, int, int]]]:
    """Export the graphs that generation runs, and list the cache of every layer.

    The graph that decodes takes any number of tokens, so that it also reads the prompt, on an empty cache.
    """
    settings = copy.deepcopy(model.generation_config)
    settings.num_beams, settings.do_sample, settings.use_cache = 1, False, True
    source = {name: value for name, value in example.items() if not name.startswith("decoder_")}
    stages = exporter.export_for_generation(
        model, source, options, generation_config=settings, multi_token_decode=True
    ).components
    settings.max_new_tokens, settings.min_new_tokens = 2, 2
    seen = model.generate(**source, generation_config=settings, return_dict_in_generate=True).past_key_values
    seen = seen.self_attention_cache if model.config.is_encoder_decoder else seen
    caches = [(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in seen.layers]
    if not model.config.is_encoder_decoder:
        return {SINGLE: stages["decode"]}, caches
    without_passed_on(stages["decode"])  # the keys and values of the source
    encoder = exporter.export(CrossAttentionEncoder(model), source, options).components[SINGLE]
    return {ENCODER: encoder, DECODER: stages["decode"]}, caches
