"""One piece of work on a random encoder in a process of its own, measured: seconds, and memory at its peak.

python benchmarks/scale_pieces.py WORK WIDTH LAYERS [--dtype float32] [--sentences 32] [--tokens 24]

Prints a line of JSON. The peak is what the process held at most beyond what it held before the work began, in multiples
of the model's own memory, the model included. Attention is two thirds of the layers, more than in any model of today.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel
from transformers.utils import logging

from collab_heads import analyze_heads, compress, swap_to_collaborative
from collab_heads.calibration.input_moments import InputMoments
from collab_heads.compression.parts.part import LEVELS
from collab_heads.fitting.head_regression import by_cost, most_costly
from collab_heads.fitting.neuron_regression import DOUBT, NeuronRegression, refit_errors
from common import ATTENTION, memory_bytes, reset_peak

VOCABULARY, HEAD, WIDER = 1000, 64, 4  # pieces; width of a head; neurons of a block by the width of the model
NEURONS = "neurons of one block"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def encoder(width: int, layers: int, dtype: torch.dtype) -> PreTrainedModel:
    """Build a random BERT whose feed-forwards are as wide as the model."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD,
        intermediate_size=width,
        max_position_embeddings=256,
        num_labels=4,
    )
    return BertForSequenceClassification(config).to(dtype).eval()


def batches(sentences: int, tokens: int, rows: int = 8) -> list[dict]:
    """Return batches of random sentences with labels."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(0, sentences, rows):
        ids = torch.randint(5, VOCABULARY, (rows, tokens), generator=generator)
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 4})
    return found


def unlabelled(given: list[dict]) -> list[dict]:
    """Return the batches without labels."""
    return [{name: value for name, value in batch.items() if name != "labels"} for batch in given]


def half(model: PreTrainedModel) -> int:
    """Return half of the model's width, for queries and keys or for values."""
    return model.config.hidden_size // 2


def train(model: PreTrainedModel, given: list[dict]) -> None:
    """Take one step of AdamW per batch."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for batch in given:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def block_of_neurons(model: PreTrainedModel) -> tuple[NeuronRegression, InputMoments]:
    """Set up the regression of a feed-forward block with `WIDER` neurons per dimension of the model, on random ones."""
    width, neurons = model.config.hidden_size, WIDER * model.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(neurons, neurons, generator=generator) / neurons**0.5
    outputs = torch.randn(1, 2 * neurons, neurons, generator=generator) @ mix
    moments = InputMoments.of(outputs, centres=False)
    weight = torch.randn(width, neurons, generator=generator)
    return NeuronRegression.of(weight, moments, neurons, doubt=DOUBT), moments


def choose_neurons(regression: NeuronRegression, moments: InputMoments) -> None:
    """Do what `compress` does for a block: the order of removal, the errors of all sizes, and one fit."""
    costs, neurons = regression.removal_costs(), len(regression.scatter)
    refit_errors(regression, by_cost(costs), range(0, neurons, neurons // (2 * LEVELS)), moments)
    regression.output(most_costly(costs, neurons // 2))


WORK: dict[str, Callable[[PreTrainedModel, list[dict]], object]] = {
    "swap, from the weights": lambda model, given: swap_to_collaborative(model, dim_shared_query_key=half(model)),
    "swap, calibrated": lambda model, given: swap_to_collaborative(
        model, dim_shared_query_key=half(model), dim_value=half(model), batches=unlabelled(given), refine_steps=0
    ),
    "swap, refined": lambda model, given: swap_to_collaborative(
        model, dim_shared_query_key=half(model), dim_value=half(model), batches=unlabelled(given), refine_steps=10
    ),
    "compress": lambda model, given: compress(model, unlabelled(given), 0.5, parts=ATTENTION, refine_steps=0),
    NEURONS: lambda block, _: choose_neurons(*block),
    "analyze": lambda model, given: analyze_heads(model, given, parts=["statistics", "relevance", "gradient"]),
    "train": train,
}


def measured(work: str, width: int, layers: int, dtype: str, sentences: int, tokens: int) -> dict:
    """Measure a piece of work in this process."""
    made = block_of_neurons if work == NEURONS else lambda model: model
    small = encoder(2 * HEAD, 1, DTYPES[dtype])
    WORK[work](made(small), batches(16, 8))  # warm-up: loads what is loaded only once
    model, given = encoder(width, layers, DTYPES[dtype]), batches(sentences, tokens)
    size, changed, before = sum(p.nbytes for p in model.parameters()), made(model), memory_bytes("VmRSS")
    reset_peak()
    started, used = time.perf_counter(), time.process_time()
    WORK[work](changed, given)
    taken = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - used}
    peak = memory_bytes("VmHWM")
    return {  # of one block the time counts alone: its moments are made before
        "work": work,
        "width": width,
        "layers": layers,
        "neurons": WIDER * width,
        "dtype": dtype,
        "tokens": sentences * tokens,
        "model_bytes": size,
        "model_mb": None if work == NEURONS else size / 1e6,
        "peak_bytes": None if work == NEURONS else peak - before + size,
        "peak": None if work == NEURONS else (peak - before + size) / size,
        **taken,
    }


def main() -> None:
    """Measure one piece."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=WORK)
    parser.add_argument("width", type=int)
    parser.add_argument("layers", type=int)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--sentences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(json.dumps(measured(**vars(arguments))))


if __name__ == "__main__":
    main()
