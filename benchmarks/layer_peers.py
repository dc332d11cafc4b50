"""Compare `compress` with other methods on fine-tuned classifiers, at the same operations of the layers.

pip install --no-deps --target SITE torch-pruning==1.6.1
PYTHONPATH=SITE python benchmarks/layer_peers.py [--tasks mrpc stsb ...] [--methods ...] [--draws 0 1 2] [--work DIR]
PYTHONPATH=SITE python benchmarks/layer_peers.py --table

all-MiniLM-L6-v2 is fine-tuned by run_glue.py for three epochs, unless DIR/TASK has the model; SST-2 on its first 8,000
sentences. Every method then leaves a share of the multiplications of the layers, attention and feed-forward blocks,
counted by torch for one sentence of 64 tokens. Nothing is trained after that, but in the rows that say "distilled": 300
steps on the examples of the draw, or on all training examples, 8,000 at most, without their labels. A draw is some
labelled training examples; methods that need no labels, or no data, do not look at them. Scores are of the dev set, x
100: accuracy for MRPC, RTE and SST-2, Spearman for STS-B, Matthews for CoLA; "intervals" are the 95 % intervals of the
losses over resampled dev sets, one per draw. Seconds are the processor's, so that a busy machine does not count, and of
the whole method, also where budgets share a measurement that ran once. Rows are kept in DIR/layer_peers.jsonl as they
come, and not repeated; --table only collects.
"""

import argparse
import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

from classifiers import FLAGS, Draw, collected, covered, measure_missing, over_tasks, stored
from dependency_pruning import dependency_pruned, magnitude, taylor
from grail import even_counts, reconstructed
from k_prune import k_pruned
from layer_blocks import TOKENS, blocks_of, operations
from retraining_free_layers import retraining_free_layers
from transformers.utils import logging

from collab_heads import distill, plan
from collab_heads.compression import measures
from collab_heads.compression.measures import Workload
from common import WORK, compressed_copy, table, write

TASKS = ("mrpc", "stsb", "cola", "sst2", "rte")
BUDGETS = (0.5, 0.33, 0.25)
COLUMNS = {"task": "", "method": "", "budget": "", "operations": ".3f", "parameters": ".3f", "score": ".2f"}
COLUMNS |= {"lost": ".2f", "losses": "", "intervals": "", "f1": ".2f", "examples": ".0f", "cpu_seconds": ".1f"}
ATTEMPTS = 12  # halvings in the search for the budget


def torch_pruned(model, draw: Draw, budget: float, *, importance: Callable, everywhere: bool):
    """Remove heads and neurons with Torch-Pruning: the same share of each kind, as nearly as heads can be divided."""
    blocks = blocks_of(model)
    kept = even_counts(blocks, budget)
    heads, neurons = kept[True] / blocks[0].count, kept[False] / blocks[1].count
    return dependency_pruned(model, draw, heads, importance=importance, everywhere=everywhere, neurons=neurons)


def compressed(model, draw: Draw, budget: float):
    """Take the steps of `compress`, without labels; one plan serves all budgets."""
    made = draw.once("plan", lambda: plan(model, draw.unlabelled, of="operations", seed=draw.number))
    return compressed_copy(made, budget_for(made, budget))[0]


def budget_for(made, share: float) -> float:
    """Return the budget of a plan that leaves a share of the operations for a sentence of `TOKENS` tokens.

    The plan counts on its own batches, whose sentences have other lengths.
    """
    work = Workload(calls=1, queries=TOKENS, keys=TOKENS, pairs=TOKENS**2)
    uses = {path: dataclasses.replace(use, work=work) for path, use in made.measured.uses.items()}

    def cost(choices) -> float:
        return sum(measures.operations(use, choices[path]) for path, use in uses.items())

    whole, low, high = cost(made.choose(1.0)), 0.9 * share, min(1.0, 1.1 * share)
    for _ in range(ATTEMPTS):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(made.choose(middle)) <= share * whole else (low, middle)
    return low


def distilled(model, draw: Draw, budget: float, on_all: bool, steps: int = 300):
    """Apply `compress`, then distil without labels, on the examples of the draw or on all of the task."""
    small = copy.deepcopy(draw.once(f"compressed {budget}", lambda: compressed(copy.deepcopy(model), draw, budget)))
    distill(small, model, draw.unlabelled_of_all if on_all else draw.unlabelled, steps, seed=draw.number)
    return small


METHODS: dict[str, Callable] = {  # method(model, draw, budget) -> the smaller model
    "compress": compressed,
    "Kwon et al. 2022": retraining_free_layers,
    "K-prune": k_pruned,
    "GRAIL": reconstructed,
    "Torch-Pruning, Taylor": functools.partial(torch_pruned, importance=taylor, everywhere=False),
    "Torch-Pruning, Taylor, over layers": functools.partial(torch_pruned, importance=taylor, everywhere=True),
    "Torch-Pruning, magnitude": functools.partial(torch_pruned, importance=magnitude, everywhere=False),
    "compress, distilled": functools.partial(distilled, on_all=False),
    "compress, distilled on all texts": functools.partial(distilled, on_all=True),
}


def parameters(model) -> int:
    """Return the number of parameters of the layers."""
    return sum(parameter.numel() for parameter in model.base_model.encoder.parameters())


SIZES = {"operations": operations, "parameters": parameters}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--draws", nargs="+", type=int, default=[0, 1, 2], help="numbers of draws")
    parser.add_argument("--examples", type=int, default=2048, help="of a draw")
    parser.add_argument("--work", type=Path, default=WORK / "glue", help="where the models and rows are")
    parser.add_argument("--table", action="store_true", help="collect only")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    place = arguments.work / "layer_peers.jsonl"
    if not arguments.table:
        methods = {name: METHODS[name] for name in arguments.methods}
        measure_missing(place, arguments.tasks, methods, BUDGETS, arguments.draws, arguments.examples, SIZES)
    rows = stored(place)
    found = collected(rows, SIZES)
    means = [line for tasks in covered(found) for line in over_tasks(found, tasks, SIZES)]
    print(table([*means, *found], COLUMNS))
    write("layer_peers", [*means, *found], flags=FLAGS, runs=rows)


if __name__ == "__main__":
    main()
