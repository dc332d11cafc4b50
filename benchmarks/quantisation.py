r"""Quantise all-MiniLM-L6-v2 while it loads, original and compressed: quality, size and time, with what runs on a CPU.

    python benchmarks/quantisation.py [--budget 0.5] [--sentences 512]
    python benchmarks/quantisation.py --table

Layers are compressed in closed form and refined. Weights are those of bitsandbytes in eight and four bits (nf4) and of
torchao in eight, with floating-point or eight-bit activations. The scores are those of compression.py: Spearman x 100
on STS-B dev, and the accuracy x 100 of a classifier on the embeddings of SST-2. Megabytes are those of the stored
weights. Times are of 1 x 32 and 32 x 128 random tokens on one thread, in turns, as shares of the original in float32.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from compression import SentenceEncoder
from transformers import AutoModel, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig
from transformers.utils import logging

from collab_heads import compress
from common import RESULTS, interleaved, table, write

ROUNDS = 7
INPUTS = {"1 x 32": (1, 32), "32 x 128": (32, 128)}
COLUMNS = {
    "layers": ".2g",
    "weights": "",
    "score": ".2f",
    "lost": ".2f",
    "lost elsewhere": ".2f",
    "megabytes": ".1f",
    "time": "",
}


def methods() -> dict[str, Callable[[], object]]:
    """Return what weights become while a model loads -> its config of transformers; None for float32."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    return {
        "float32": lambda: None,
        "bitsandbytes, 8 bits": lambda: BitsAndBytesConfig(load_in_8bit=True),
        "bitsandbytes, 4 bits": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        "torchao, 8 bits": lambda: TorchAoConfig(Int8WeightOnlyConfig()),
        "torchao, 8 bits, activations too": lambda: TorchAoConfig(Int8DynamicActivationInt8WeightConfig()),
    }


def loaded(folder: Path, method: Callable[[], object]) -> PreTrainedModel:
    """Load a model, quantised on the way."""
    return AutoModel.from_pretrained(folder, quantization_config=method(), dtype=torch.float32).eval()


def megabytes(model: PreTrainedModel) -> float:
    """Return the size of its stored weights."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) / 1e6


def calls(model: PreTrainedModel) -> dict[str, Callable[[], object]]:
    """Return what is timed of a model, by the names of `INPUTS`."""
    generator, found = torch.Generator().manual_seed(0), {}
    for words, (rows, tokens) in INPUTS.items():
        ids = torch.randint(1000, 30_000, (rows, tokens), generator=generator)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
        found[words] = lambda inputs=inputs: model(**inputs)
    return found


def measure(budget: float, sentences: int) -> list[dict]:
    """Return the rows of the original and of the compressed model, in every kind of weights."""
    task, rows, timed = SentenceEncoder(), {}, {}
    with tempfile.TemporaryDirectory() as place:
        folders = {1.0: Path(place) / "original", budget: Path(place) / "compressed"}
        model = task.load()
        model.save_pretrained(folders[1.0])
        compress(model, task.batches(0, sentences), budget, multiple_of=64, seed=0)
        model.save_pretrained(folders[budget])
        for layers, folder in folders.items():
            for weights, method in methods().items():
                quantised = loaded(folder, method)
                size = megabytes(quantised)  # before the first call: see the guide on four bits
                with torch.no_grad():
                    row = {"score": task.score(quantised), "elsewhere": task.score_elsewhere(quantised)}
                rows[layers, weights] = {"layers": layers, "weights": weights, "megabytes": size, **row}
                print(rows[layers, weights], flush=True)
                for words, call in calls(quantised).items():
                    timed.setdefault(words, {})[layers, weights] = call
        torch.set_num_threads(1)
        with torch.no_grad():
            for words, functions in timed.items():
                for key, seconds in interleaved(functions, ROUNDS).items():
                    rows[key].setdefault("times", {})[words] = seconds
    return compared(list(rows.values()))


def compared(rows: list[dict]) -> list[dict]:
    """Return the rows with what they lost, and their times as shares of the first row's."""
    first = rows[0]
    return [
        row
        | {
            "lost": first["score"] - row["score"],
            "lost elsewhere": first["elsewhere"] - row["elsewhere"],
            "time": ", ".join(f"{row['times'][words] / seconds:.2f}" for words, seconds in first["times"].items()),
        }
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--sentences", type=int, default=512, help="to calibrate on")
    parser.add_argument("--table", action="store_true", help="only print the stored rows")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    if not arguments.table:
        write("quantisation", measure(arguments.budget, arguments.sentences))
    rows: list[Mapping] = json.loads((RESULTS / "quantisation.json").read_text())["rows"]
    print(table(rows, COLUMNS))


if __name__ == "__main__":
    main()
