"""The target transformers.js: the graph of ONNX Runtime, with the names and in the layout that this library reads."""

import re
from typing import Any, ClassVar

from collab_heads.base.option_values import ExportTarget
from collab_heads.errors import UnsupportedModelError
from collab_heads.saving.source_files import MODULES
from collab_heads.serving.exported_folder import CACHES, EXPORT, SINGLE
from collab_heads.serving.for_graphs import Onnx
from collab_heads.serving.sentence_encoder import MODULE

FOLDER, GRAPH = "onnx", f"{SINGLE}.onnx"
MOST = 2**31 - 2**20  # bytes of a graph with its weights in one file, which a browser fetches
# an array of a cache, as transformers' exporter names it
CACHED = re.compile(r"(?P<side>input|output)\.(?:past_key_values|cache)\.layers\.(?P<layer>\d+)\.(?P<array>key|value)s")
SIDES = {"input": "past_key_values", "output": "present"}


class TransformersJs(Onnx):
    """transformers.js, in browsers and in Node."""

    name: ClassVar[ExportTarget] = "transformers.js"

    def check(self, model, int8, tokenizer):
        super().check(model, int8, tokenizer)
        if model.config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"transformers.js: {type(model).__name__} is an encoder-decoder, which this library decodes with one "
                "graph for the first token and for all others; export writes none. Choose to='onnx'"
            )

    def settle(self, folder):
        """Rename the inputs and outputs of the graph, and move it; what others read beside it goes."""
        import onnx

        files = [folder / GRAPH, folder / f"{GRAPH}.data"]
        if (size := sum(file.stat().st_size for file in files if file.exists())) > MOST:
            raise UnsupportedModelError(
                f"transformers.js: the graph has {size / 1e9:.1f} GB, and one file holds 2: give weights fewer bits, "
                "or choose to='onnx'"
            )
        program = onnx.load(files[0])
        rename(program.graph)
        (folder / FOLDER).mkdir()
        onnx.save_model(program, folder / FOLDER / GRAPH)
        for file in (*files, *(folder / name for name in (EXPORT, CACHES, MODULES, f"{MODULE}.py"))):
            file.unlink(missing_ok=True)


def rename(graph: Any) -> None:
    """Give the arrays of the cache, the batch axis and sizes that are numbers the names that transformers.js reads."""
    names = {each.name: renamed(each.name) for each in (*graph.input, *graph.output)}
    batch = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for each in (*graph.input, *graph.output, *graph.value_info):
        each.name = names.get(each.name, each.name)
        for axis in each.type.tensor_type.shape.dim:
            if axis.dim_param.isdigit():
                axis.dim_value = int(axis.dim_param)
            elif axis.dim_param == batch:
                axis.dim_param = "batch_size"
    for node in graph.node:
        for values in (node.input, node.output):
            values[:] = [names.get(name, name) for name in values]


def renamed(name: str) -> str:
    """Return the name of an input or an output: `past_key_values.0.key`, `present.0.key`; others stay."""
    found = CACHED.fullmatch(name)
    return f"{SIDES[found['side']]}.{found['layer']}.{found['array']}" if found else name
