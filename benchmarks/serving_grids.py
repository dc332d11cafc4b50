r"""Serve all-MiniLM-L6-v2 with weights on grids of few bits: floating-point, packed and integer graphs of both engines.

    python benchmarks/serving_grids.py [--rounds 15]

"8 bits" and "4 bits" are all weights and embeddings rounded to the grid of so many bits; "10MB" is `compress(model,
batches, "10MB", bits=(8, 4, 3))` on 256 sentences; scores are not measured here. The same model is exported in
floating point, packed, and with eight bits also for products of integers (`int8=True`). Times are processor seconds of
one thread, medians of rounds in turns, of 1 x 16 and 32 x 64 random tokens, as shares of those of the floating-point
graph in the same engine. "Load" is processor seconds and "memory" the megabytes that a process of its own grows by
when the engine alone loads the graph and runs it once, on 1 x 16 tokens. "Difference" is the largest one of an output
from that of the model in PyTorch, as a share of the largest output.
"""

import argparse
import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from collab_heads import compress, export
from collab_heads.demo import sentences
from collab_heads.fitting.weight_grid import nearest_on_grid
from collab_heads.layers.weight_grid import WEIGHT_BITS, leave_grids
from collab_heads.model.site_size import num_bytes
from common import WORK, memory_bytes, minilm, table, write

ENGINES, SIZES = ("onnx", "openvino"), ((1, 16), (32, 64))
ROUNDED = "packed, states rounded"  # as OpenVINO does by default
COLUMNS = {"model": "", "weights, MB": ".2f", "engine": "", "graph": "", "MB": ".2f", "time": "", "load": ".2f"}
COLUMNS |= {"memory": ".0f", "difference": ".1e"}


def rounded(bits: int) -> PreTrainedModel:
    """Return the model with all weights rounded to a grid."""
    model = AutoModel.from_pretrained(minilm()).eval()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data = nearest_on_grid(module.weight.data, bits).weight()
            setattr(module, WEIGHT_BITS, bits)
    return model


def planned(budget: str) -> PreTrainedModel:
    """Return the model within a budget of bytes; it is kept for the next run."""
    folder = WORK / "serving_grids" / budget
    if not folder.exists():
        model, batches = AutoModel.from_pretrained(minilm()).eval(), [inputs(32, seed) for seed in range(8)]
        compress(model, batches, budget, bits=(8, 4, 3), refine_steps=0)
        model.save_pretrained(folder)
    return AutoModel.from_pretrained(folder).eval()


def inputs(count: int, seed: int) -> dict[str, torch.Tensor]:
    """Return a batch of sentences."""
    tokenizer = AutoTokenizer.from_pretrained(minilm())
    return dict(tokenizer(sentences(count, seed=seed), padding=True, return_tensors="pt"))


def random_tokens(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return a batch without padding."""
    ids = torch.randint(1000, 30_000, (rows, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}


def loaded(folder: Path, engine: str, graph: str) -> Any:
    """Load a graph into its engine, with one thread."""
    from transformers.exporters.base import ExportedModel

    options: dict[str, Any]
    if engine == "onnx":
        import onnxruntime

        options = {"session_options": onnxruntime.SessionOptions()}
        options["session_options"].intra_op_num_threads = 1
    else:
        options = {"config": {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}}
        if graph == ROUNDED:
            options["config"]["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 32
    exported = ExportedModel.from_pretrained(folder, device="cpu")
    exported.to("cpu", **options)
    return exported


def costs_of_loading(folder: Path, engine: str) -> dict[str, float]:
    """Return processor seconds and megabytes of an engine alone."""
    fed = {name: each.numpy() for name, each in random_tokens(*SIZES[0]).items()}
    if engine == "onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        before, started = memory_bytes("VmRSS"), time.process_time()
        session = onnxruntime.InferenceSession(folder / "model.onnx", options)
        session.run(None, {each.name: fed[each.name] for each in session.get_inputs()})
    else:
        import openvino

        core = openvino.Core()
        core.get_property("CPU", "FULL_DEVICE_NAME")  # loads what runs there
        before, started = memory_bytes("VmRSS"), time.process_time()
        options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
        graph = core.compile_model(folder / "openvino_model.xml", "CPU", options)
        graph({each.any_name: fed[each.any_name] for each in graph.inputs})
    return {"load": time.process_time() - started, "memory": (memory_bytes("VmRSS") - before) / 1e6}


@torch.no_grad()
def difference(model: PreTrainedModel, served: Any) -> float:
    """Return the largest difference of an output, as a share of the largest one; padding does not count."""
    batch = inputs(32, 100)
    expected, found = (each(**batch)["last_hidden_state"][batch["attention_mask"].bool()] for each in (model, served))
    return float((found - expected).abs().max() / expected.abs().max())


def exported(name: str, model: PreTrainedModel, place: Path) -> Iterator[tuple[dict, Any]]:
    """Yield a row and the loaded graph, for every engine and kind of graph."""
    size, without = num_bytes(model) / 1e6, copy.deepcopy(model)
    leave_grids(without)
    for engine in ENGINES:
        more = ["int8"] if name == "8 bits" else [ROUNDED] * (engine == "openvino")
        for graph in ("packed", "float32", *more):
            folder = place / name / engine / graph.split(",")[0]
            if graph != ROUNDED:
                chosen = without if graph == "float32" else model
                export(chosen, folder, engine, int8=graph == "int8", batches=[inputs(8, 0)])
            served = loaded(folder, engine, graph)
            megabytes = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
            row = {"model": name, "weights, MB": size, "engine": engine, "graph": graph, "MB": megabytes}
            if graph != ROUNDED:
                called = [sys.executable, __file__, "--load", str(folder), engine]
                row |= json.loads(subprocess.run(called, check=True, capture_output=True, text=True).stdout)
            yield row | {"difference": difference(model, served)}, served


def timed(served: dict[tuple, Any], rounds: int) -> dict[tuple, list[float]]:
    """Return the median processor seconds of each, by size of the batch; all are run in turns."""
    found: dict[tuple, list[float]] = {key: [] for key in served}
    for size in SIZES:
        batch, seconds = random_tokens(*size), {key: list[float]() for key in served}
        repeats = 10 if size == SIZES[0] else 1
        for turn in range(rounds + 1):
            for key, model in served.items():
                started = time.process_time()
                for _ in range(repeats):
                    model(**batch)
                if turn:
                    seconds[key].append((time.process_time() - started) / repeats)
        for key, each in seconds.items():
            found[key].append(statistics.median(each))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--load", nargs=2, metavar=("FOLDER", "ENGINE"), help="only load it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if arguments.load:
        print(json.dumps(costs_of_loading(Path(arguments.load[0]), arguments.load[1])))
        return
    place, rows, served = WORK / "serving_grids" / "exported" / str(time.time_ns()), {}, {}
    for name, model in (("8 bits", rounded(8)), ("4 bits", rounded(4)), ("10MB", planned("10MB"))):
        for row, each in exported(name, model, place):
            key = name, row["engine"], row["graph"]
            rows[key], served[key] = row, each
            print(row, flush=True)
    for key, seconds in timed(served, arguments.rounds).items():
        rows[key]["seconds"] = seconds
    for (name, engine, _), row in rows.items():
        whole = rows[name, engine, "float32"]["seconds"]
        row["time"] = ", ".join(f"{mine / own:.2f}" for mine, own in zip(row["seconds"], whole, strict=True))
    print(table(rows.values(), COLUMNS))
    write("serving_grids", [*rows.values()])


if __name__ == "__main__":
    main()
