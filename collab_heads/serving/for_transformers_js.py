"""The target transformers.js: the graphs of ONNX Runtime, with the names and in the layout that this library reads."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from collab_heads.base.option_values import ExportTarget
from collab_heads.errors import UnsupportedModelError
from collab_heads.layers.weight_grid import OF_ROWS, on_grid
from collab_heads.saving.source_files import MODULES
from collab_heads.serving.exported_folder import CACHES, DECODER, ENCODER, EXPORT, SINGLE
from collab_heads.serving.for_graphs import Onnx
from collab_heads.serving.sentence_encoder import MODULE
from collab_heads.serving.text_reader import STATES

FOLDER = "onnx"
FILES = {SINGLE: "model", ENCODER: "encoder_model", DECODER: "decoder_model_merged"}  # of graphs
# of files, by what the library calls their numbers
SUFFIXES = {"fp32": "", "fp16": "_fp16", "q8": "_quantized", "q4": "_q4"}
FOUR = 4  # bits
MOST = 2**31 - 2**26  # bytes of the weights of a graph, which lie with it in one file that a browser fetches
# an array of a cache, as transformers' exporter names it
CACHED = re.compile(
    r"(?P<side>input|output)\.(?:past_key_values|cache)\.(?P<own>self_attention_cache\.)?"
    r"layers\.(?P<layer>\d+)\.(?P<array>key|value)s"
)
CROSS = re.compile(r"input\.(?:past_key_values|cache)\.cross_attention_cache\.layers\.(?P<layer>\d+)\.(?P<array>\w+)s")
SIDES = {"input": "past_key_values", "output": "present"}
OF_SOURCE = "encoder_hidden_states"
OF_DECODER = {  # other inputs of a decoder
    "decoder_input_ids": "input_ids",
    "attention_mask": "encoder_attention_mask",
    f"encoder_outputs.{STATES}": OF_SOURCE,
}


class TransformersJs(Onnx):
    """transformers.js, in browsers and in Node."""

    name: ClassVar[ExportTarget] = "transformers.js"

    def tune(self, program):
        """Leave the graph: engines in browsers run sums of numbers on the processor, away from the rest."""

    def settle(self, model, folder, int8):
        """Rename the inputs and outputs of the graphs, and move them; what others read beside them goes."""
        import onnx

        suffix, graphs = SUFFIXES[dtype_of(model, int8)], dict[str, Any]()
        for name in FILES:
            if (file := folder / f"{name}.onnx").exists():
                graphs[name] = onnx.load(file)
        if DECODER in graphs:
            graphs[ENCODER] = moved_keys(graphs[ENCODER], graphs[DECODER])
        for program in graphs.values():  # with the weights that graphs shared
            if (size := sum(len(each.raw_data) for each in program.graph.initializer)) > MOST:
                raise UnsupportedModelError(
                    f"transformers.js: the graph has {size / 1e9:.1f} GB, and one file holds 2: give weights fewer "
                    "bits, or choose to='onnx'"
                )
        (folder / FOLDER).mkdir()
        for name, program in graphs.items():
            rename(program.graph, OF_DECODER if name == DECODER else {})
            onnx.save_model(program, folder / FOLDER / f"{FILES[name]}{suffix}.onnx")
        written = [f"{name}.onnx{end}" for name in graphs for end in ("", ".data")]
        for name in (*written, EXPORT, CACHES, MODULES, f"{MODULE}.py"):
            (folder / name).unlink(missing_ok=True)


def dtype_of(model: PreTrainedModel, int8: bool) -> str:
    """Return what transformers.js calls the numbers of a graph: fp32, fp16, q8 or q4."""
    bits = [OF_ROWS] * int8 + [grid.bits for _, _, grid in on_grid(model) if grid is not None]
    if not bits:
        return "fp16" if model.dtype == torch.float16 else "fp32"
    return "q8" if max(bits) > FOUR else "q4"


def moved_keys(encoder: Any, decoder: Any) -> Any:
    """Move what makes the keys and values of cross-attention from an encoder to its decoder; return the encoder.

    The library passes on nothing but the states of the encoder, and runs one decoder for every token. So the decoder
    computes these keys and values again for every token.

    Args:
        encoder: the graph of the encoder.
        decoder: that of the decoder, which is changed.

    Raises:
        UnsupportedModelError: if they are not made of the states alone.
    """
    from onnx.utils import Extractor

    keys = [each.name for each in encoder.graph.output if each.name != STATES]
    part = Extractor(encoder).extract_model([STATES], keys).graph
    made = {
        STATES,
        "",
        *(each.name for each in part.initializer),
        *(name for node in part.node for name in node.output),
    }
    takes = {
        f"{found['array']}_{found['layer']}": each
        for each in decoder.graph.input
        if (found := CROSS.fullmatch(each.name))
    }
    names = {STATES: f"encoder_outputs.{STATES}", "": ""} | {key: each.name for key, each in takes.items()}
    for each in part.initializer:
        each.name = names.setdefault(each.name, f"of_source.{each.name}")
    for node in part.node:
        if node.op_type == "Shape" and not any(each.name == "end" and each.i > 2 for each in node.attribute):
            node.input[:] = [STATES]  # the inputs of the encoder have the same rows and tokens
        if others := {*node.input} - made:
            raise UnsupportedModelError(
                f"transformers.js: the keys of cross-attention are made of {', '.join(others)}, too: choose to='onnx'"
            )
        for values in (node.input, node.output):
            values[:] = [names.setdefault(name, f"of_source.{name}") for name in values]
        node.name = f"of_source.{node.name}"
    decoder.graph.initializer.extend(part.initializer)
    for old, new in (
        (decoder.graph.input, [each for each in decoder.graph.input if not CROSS.fullmatch(each.name)]),
        (decoder.graph.node, [*part.node, *decoder.graph.node]),
    ):
        del old[:]
        old.extend(new)
    return Extractor(encoder).extract_model([each.name for each in encoder.graph.input], [STATES])


def rename(graph: Any, others: Mapping[str, str]) -> None:
    """Give the arrays of the cache, the batch axis and sizes that are numbers the names that transformers.js reads.

    Args:
        graph: the graph, which is changed.
        others: names of other inputs -> those that they get.
    """
    names = {each.name: others.get(each.name) or renamed(each.name) for each in (*graph.input, *graph.output)}
    rows = {each.type.tensor_type.shape.dim[0].dim_param for each in graph.input}
    for each in (*graph.input, *graph.output, *graph.value_info):
        each.name = names.get(each.name, each.name)
        for axis in each.type.tensor_type.shape.dim:
            if axis.dim_param.isdigit():
                axis.dim_value = int(axis.dim_param)
            elif axis.dim_param in rows:
                axis.dim_param = "batch_size"
    for node in graph.node:
        for values in (node.input, node.output):
            values[:] = [names.get(name, name) for name in values]


def renamed(name: str) -> str:
    """Return the name of an input or an output: `past_key_values.0.key`, `present.0.key`; others stay.

    Arrays of an encoder-decoder are `past_key_values.0.decoder.key`.
    """
    if (found := CACHED.fullmatch(name)) is None:
        return name
    own = ".decoder" if found["own"] else ""
    return f"{SIDES[found['side']]}.{found['layer']}{own}.{found['array']}"
