"""The targets ONNX Runtime and OpenVINO: graphs that transformers' exporters make, finished for their engines."""

import copy
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from collab_heads.base.extras import check_extra
from collab_heads.base.option_values import ExportTarget
from collab_heads.errors import ArgumentError, CollabHeadsError, DataError, UnsupportedModelError
from collab_heads.layers.attention import CACHE
from collab_heads.layers.weight_grid import OF_ROWS
from collab_heads.serving.comparison import compare, naming_outputs
from collab_heads.serving.example_inputs import whole_cache
from collab_heads.serving.exported_folder import CACHES, DECODER, ENCODER, SINGLE
from collab_heads.serving.fusions_in_onnx import keep_additions_apart
from collab_heads.serving.grids_in_graphs import Grids, pack_openvino
from collab_heads.serving.grids_in_onnx import pack_onnx
from collab_heads.serving.loading import check_exporters, load_exported
from collab_heads.serving.served_model import CrossAttentionEncoder
from collab_heads.serving.target import Target, first_line, quiet, why
from collab_heads.sites.record import forget

PAGE = 4096  # bytes, at whose multiples weights begin, so that an engine can map them into memory
LEAST = 4096  # bytes of a weight that is shared: less than that is filled up to a page


class Graph(Target):
    """A graph that transformers' own exporters make: any size in every layer, a cache where the model generates."""

    has_int8 = embeds = True
    site_seconds = 1.3, 1.9
    engine: ClassVar[str]  # that runs it; the extra of pyproject.toml with its packages

    def check(self, model, int8, tokenizer):
        super().check(model, int8, tokenizer)
        if int8:
            check_dtypes(model, (torch.float32,), "int8=True")

    def check_installed(self, int8):
        super().check_installed(int8)
        check_extra(self.engine, f"exports to {self.name}")
        check_exporters(f"exports to {self.name}")

    def exporter(self) -> Any:
        """Return transformers' exporter."""

    def options(self, model: PreTrainedModel, example: Mapping) -> Any:
        """Return its options for a model."""

    def graphs(self, model: Any, example: Mapping) -> tuple[dict[str, Any], list[tuple[int, int, int]]]:
        """Export the graphs of a model, and list the cache of every layer that is an input of one."""
        exporter, options = self.exporter(), self.options(model, example)
        if model.can_generate():
            return generating(exporter, options, model, example)
        return exporter.export(model, dict(example), options).components, []

    def generation(self, model: Any) -> Any:
        """Return the generation config that is written beside the graphs of a model."""
        return copy.deepcopy(model.generation_config)

    def pack(self, program: Any, grids: Grids) -> None:
        """Pack the weights of a graph that lie on grids; without this they are floating-point numbers."""

    def tune(self, program: Any) -> None:
        """Write a graph as its engine runs it fastest; without this it stays as it is."""

    def finish(self, folder: Path, graphs: Collection[str]) -> None:
        """Finish what was written."""

    def write(self, model, folder, example, *, tokenizer, int8):
        """Export one graph, or those of an encoder and a decoder with their cache."""
        from transformers.exporters.base import ExportedModel

        with quiet(), naming_outputs(model), torch.no_grad():
            try:
                components, caches = self.graphs(model, example)
            except (CollabHeadsError, OSError):
                raise
            except Exception as error:
                raise UnsupportedModelError(
                    f"transformers' exporter to {self.name} fails on {type(model).__name__}: {why(error)}"
                ) from error
            config = copy.deepcopy(model.config)
            forget(config)
            config.name_or_path = ""  # the modules beside a trimmed model are in the graph
            config.architectures = [type(model).__name__]  # a loaded config names the class of its checkpoint
            generation = self.generation(model) if model.can_generate() else None
            if generation is not None:  # the graph decodes with a cache, whatever the config says
                generation.use_cache = config.get_text_config().use_cache = True
            grids = Grids(model, OF_ROWS if int8 else None)
            for component in components.values():
                if grids.bits or int8:
                    self.pack(component.program, grids)
                self.tune(component.program)
            ExportedModel(components, self.exporter().export_format, config, generation).save_pretrained(folder)
            self.finish(folder, components)
        if caches:
            (folder / CACHES).write_text(json.dumps({"layers": caches}), encoding="utf-8")
        return tuple(grids.notes())

    def load(self, model, folder):
        with quiet(), self.naming(model):
            try:
                return load_exported(folder, threads=1, check=False)  # digests are written last
            except DataError as error:  # of a file that was just written: its engine cannot run it
                raise error.__cause__ or error from None

    def compare(self, model, folder, batches, tokenizer):
        served = InEngine(self.load(model, folder), partial(self.naming, model))
        return compare(model, served, batches, generates=model.can_generate())

    @contextmanager
    def naming(self, model: PreTrainedModel) -> Iterator[None]:
        """Raise the errors of an engine as one that names it and the model."""
        try:
            yield
        except (CollabHeadsError, OSError):
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{self.name} fails on {type(model).__name__}, as transformers' exporter wrote it: {first_line(error)}"
            ) from error


@dataclass(frozen=True)
class InEngine:
    """A model in an engine, whose errors are named; those of the original stay as they are.

    Attributes:
        served: the model.
        naming: makes what names the errors.
    """

    served: Any
    naming: Callable[[], AbstractContextManager]

    def __call__(self, **inputs: Any) -> Any:
        """Run the model."""
        with self.naming():
            return self.served(**inputs)

    def generate(self, **options: Any) -> Any:
        """Generate with it."""
        with self.naming():
            return self.served.generate(**options)


class Onnx(Graph):
    """ONNX Runtime."""

    name: ClassVar[ExportTarget] = "onnx"
    engine = "onnx"

    def check(self, model, int8, tokenizer):
        super().check(model, int8, tokenizer)
        # it has no kernels of bfloat16 on processors, and transformers' exporter makes caches of float32
        known = (torch.float32,) if model.can_generate() else (torch.float32, torch.float16)
        check_dtypes(model, known, f"to={self.name!r}")

    def exporter(self):
        from transformers.exporters.exporter_onnx import OnnxExporter

        return OnnxExporter()

    def options(self, model, example):
        from transformers.exporters.configs import OnnxConfig

        return OnnxConfig(dynamic=True)

    def pack(self, program, grids):
        pack_onnx(program, grids)

    def tune(self, program):
        keep_additions_apart(program)

    def finish(self, folder, graphs):
        if DECODER in graphs:
            share_weights(folder, ENCODER, DECODER)


class OpenVino(Graph):
    """OpenVINO."""

    name, engine = "openvino", "openvino"

    def exporter(self):
        from transformers.exporters.exporter_openvino import OpenVINOExporter

        return OpenVINOExporter()

    def options(self, model, example):
        from transformers.exporters.configs import OpenVINOConfig

        return OpenVINOConfig(dynamic=True, stateful=False)

    def pack(self, program, grids):
        pack_openvino(program, grids)


def check_dtypes(model: PreTrainedModel, known: Collection[torch.dtype], option: str) -> None:
    """Raise ArgumentError, which names an option, if a model has weights of other types."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if not dtypes <= set(known):
        found = ", ".join(sorted(map(str, dtypes)))
        raise ArgumentError(f"{option}: the model has weights in {found}; load it with dtype=torch.float32")


def generating(
    exporter: Any, options: Any, model: Any, example: Mapping
) -> tuple[dict[str, Any], list[tuple[int, int, int]]]:
    """Export the graphs that generation runs, and list the cache of every layer.

    The graph that decodes takes any number of tokens, so that it also reads the prompt, on an empty cache: transformers
    would export another one for that, and take twice as long. A cache holds all tokens, also where a window slides, and
    the mask hides those outside: a sliding cache cuts itself to its window and counts in Python, which a graph cannot
    do.
    """
    from transformers.exporters.utils import decompose_for_generation

    settings = copy.deepcopy(model.generation_config)
    settings.num_beams, settings.do_sample, settings.use_cache = 1, False, True
    source = {name: value for name, value in example.items() if not name.startswith("decoder_")}
    stages = decompose_for_generation(model, source | whole_cache(model), settings, multi_token_decode=True)
    decoding, inputs = stages["decode"]
    seen = inputs[CACHE].self_attention_cache if model.config.is_encoder_decoder else inputs[CACHE]
    used = [layer for layer in seen.layers if layer.keys is not None]  # some have one for each layer of the encoder
    caches = [(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in used]
    decoder = exporter.export(decoding, inputs, options).components[SINGLE]
    if not model.config.is_encoder_decoder:
        return {SINGLE: decoder}, caches
    without_passed_on(decoder)  # the keys and values of the source
    encoder = exporter.export(CrossAttentionEncoder(model), source, options).components[SINGLE]
    return {ENCODER: encoder, DECODER: decoder}, caches


def without_passed_on(component: Any) -> None:
    """Remove the outputs of a graph that are inputs, passed on unchanged; where one was, the graph returns None.

    A decoder with cross-attention returns its whole cache, also the keys and values of the source, which it only reads.
    To copy them at every step takes time, and OpenVINO (2026.4) ends the process: it keeps such an output in the memory
    of the input, and reads it in the next call, when that memory is freed.

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


def share_weights(folder: Path, first: str, second: str) -> None:
    """Store the weights that two ONNX graphs have in common once, in the file of the first.

    Args:
        folder: of the graphs, `NAME.onnx` with the weights in `NAME.onnx.data`.
        first: the graph whose file stays as it is.
        second: the graph whose files are written again.
    """
    import onnx

    places, path = {}, folder / f"{second}.onnx"
    for tensor, content in weights_in(onnx.load(str(folder / f"{first}.onnx"), load_external_data=False), folder):
        if len(content) >= LEAST:
            places[digest(tensor, content)] = entries(tensor)
    model = onnx.load(str(path), load_external_data=False)
    written = folder / f"{second}.onnx.data.new"
    with written.open("wb") as file:
        for tensor, content in weights_in(model, folder):
            place = places.get(digest(tensor, content))
            if place is None:
                file.write(b"\0" * (-file.tell() % (PAGE if len(content) >= LEAST else 1)))
                place = {"location": f"{second}.onnx.data", "offset": str(file.tell()), "length": str(len(content))}
                file.write(content)
            del tensor.external_data[:]
            for key, value in place.items():
                tensor.external_data.add(key=key, value=value)
    os.replace(written, folder / f"{second}.onnx.data")
    path.write_bytes(model.SerializeToString())


def weights_in(model: Any, folder: Path) -> list[tuple[Any, bytes]]:
    """Return the weights of a graph that stand in files beside it, with their bytes, by file and place."""
    found = []
    for tensor in model.graph.initializer:
        place = entries(tensor)
        if place:
            with (folder / place["location"]).open("rb") as file:
                file.seek(int(place.get("offset", 0)))
                found.append((tensor, file.read(int(place["length"]))))
    return found


def entries(tensor: Any) -> dict[str, str]:
    """Return where the bytes of a weight stand; nothing if they stand in the graph."""
    return {each.key: each.value for each in tensor.external_data}


def digest(tensor: Any, content: bytes) -> tuple:
    """Return what weights have in common that are the same."""
    return tensor.data_type, tuple(tensor.dims), hashlib.sha256(content).digest()
