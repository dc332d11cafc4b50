r"""Drop whole layers of all-MiniLM-L6-v2 and distil what is left: what a user would otherwise do for a smaller model.

    python benchmarks/dropped_layers.py [--layers 3 2 1] [--steps 300 1000] [--learning_rates 0.01 0.003]

Of six layers some are kept: those whose model puts out, before anything is trained, sentence vectors nearest to the
original's. Everything in them is then trained like the models of `compress` by `distill`: on the same sentences, for as
many steps, and so that states and sentence vectors are the original's. The states after layer i of k are compared with
those of the original after as large a share of its layers. Of several learning rates, relative to the size of a tensor,
the row has the one with the smallest held-out error. Scores are those of `compression.py`.
Times are in turns with the original, in PyTorch, on one thread: 1 x 32 and 32 x 128 random tokens.
"""

import argparse
import copy
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from compression import SCORES, SentenceEncoder
from lm_peer import reproduce
from serving import calls
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from collab_heads.distillation.gap import Gap
from collab_heads.distillation.processes import Processes
from collab_heads.running.outputs import Output
from common import interleaved, table, write

SELECTED_ON = 8  # batches by which the layers to keep are chosen
COLUMNS = {"layers": "", "kept": "", "steps": "", "learning_rate": "", "parameters": ",", "score": ".2f"}
COLUMNS |= dict.fromkeys(SCORES.values(), ".2f") | {"time": "", "seconds": ".0f"}


class LayerGap(Gap):
    """The gap between a model with fewer layers and its original, whose states are taken at as large shares of it."""

    def run(self, model: PreTrainedModel, index: int, portion: Mapping) -> list[Output]:
        *states, output = super().run(model, index, portion)
        count, kept = self.original.config.num_hidden_layers, self.model.config.num_hidden_layers
        if model is self.original:
            states = [states[(layer + 1) * count // kept - 1] for layer in range(kept)]
        return [*states, output]


def with_layers(original: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """Return a copy of a BERT with some of its layers."""
    model = copy.deepcopy(original)
    model.encoder.layer = nn.ModuleList(model.encoder.layer[index] for index in kept)
    model.config.num_hidden_layers = len(kept)
    return model


@torch.no_grad()
def nearest(original: PreTrainedModel, count: int, batches: Sequence[Mapping]) -> tuple[int, ...]:
    """Return the layers to keep: of all choices those that move the sentence vectors least."""

    def moved(kept: tuple[int, ...]) -> float:
        gap = LayerGap.measured(with_layers(original, kept), original, processes, numbered, 1.0)
        return gap.error(numbered).output

    processes, numbered = Processes.found(None, None, True), [*enumerate(batches[:SELECTED_ON])]
    return min(itertools.combinations(range(original.config.num_hidden_layers), count), key=moved)


def distilled(model: PreTrainedModel, original: PreTrainedModel, batches: list[dict], steps: int, rate: float) -> float:
    """Train the layers of a model, in place, to reproduce its original; return the held-out error."""
    trained = {name: parameter for name, parameter in model.named_parameters() if "encoder.layer" in name}
    return reproduce(model, original, batches, trained, steps, 0, rate, LayerGap)


def measure(arguments: argparse.Namespace) -> Iterator[dict]:
    """Yield the row of the original, and one for each number of layers and of steps."""
    task = SentenceEncoder()
    original, batches = task.load(), task.unlabelled(0)
    row = {"layers": original.config.num_hidden_layers, "parameters": original.num_parameters()}
    yield row | {"model": original} | task.scores(original)
    for count in arguments.layers:
        kept = nearest(original, count, batches)
        for steps in arguments.steps:
            started, tried = time.perf_counter(), []
            for rate in arguments.learning_rates if steps else (0.0,):
                model = with_layers(original, kept)
                error = distilled(model, original, batches, steps, rate) if steps else 0.0
                tried.append((error, rate, model))
                print(count, kept, steps, rate, error, flush=True)
            error, rate, model = min(tried, key=lambda each: each[0])
            row = {"layers": count, "kept": ", ".join(map(str, kept)), "steps": steps, "learning_rate": rate}
            row |= {"error": error, "parameters": model.num_parameters(), "seconds": time.perf_counter() - started}
            yield row | {"model": model} | task.scores(model)


def timed(models: Sequence[PreTrainedModel]) -> list[str]:
    """Return the times of models as shares of that of the first one, measured in turns."""
    torch.set_num_threads(1)
    shares: list[list[str]] = [[] for _ in models]
    with torch.no_grad():
        functions = [calls("minilm", None, model) for model in models]
        for words in functions[0]:
            seconds = interleaved({str(place): each[words] for place, each in enumerate(functions)}, 15)
            for place, share in enumerate(shares):
                share.append(f"{seconds[str(place)] / seconds['0']:.3f}")
    return [", ".join(share) for share in shares]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[3, 2, 1], help="to keep, of six")
    parser.add_argument("--steps", nargs="+", type=int, default=[0, 300, 1000], help="of distillation")
    parser.add_argument("--learning_rates", nargs="+", type=float, default=[0.01, 0.003], help="to try")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    rows = []
    for row in measure(arguments):
        rows.append(row)
        print(table([row], COLUMNS).splitlines()[-1], flush=True)
    for row, time_share in zip(rows, timed([row.pop("model") for row in rows]), strict=True):
        row |= {"time": time_share} | {lost: rows[0][name] - row[name] for name, lost in SCORES.items()}
    print(table(rows, COLUMNS))
    write("dropped_layers", rows)


if __name__ == "__main__":
    main()
