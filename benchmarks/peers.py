"""Make the attention of a fine-tuned classifier smaller with Torch-Pruning, with Kwon et al. 2022, and with our own.

pip install --no-deps --target SITE torch-pruning==1.6.1
PYTHONPATH=SITE python benchmarks/peers.py [--tasks mrpc stsb rte cola] [--methods ...] [--draws 3] [--work DIR]
PYTHONPATH=SITE python benchmarks/peers.py --table

all-MiniLM-L6-v2 is fine-tuned by run_glue.py for three epochs (FLAGS), unless DIR/TASK has the model. Every method
then leaves a share of attention's parameters (query, key, value and output projections; where whole heads go that is
the share of heads), and nothing is trained after that, but for the rows that say "distilled". A draw is 2,048 labelled
training examples; methods that need no labels, or no data, do not look at them. Scores are of the dev set, x 100:
accuracy for MRPC and RTE, Spearman for STS-B, Matthews for CoLA; the JSON has the other metrics of each. Seconds are
the processor's, so that a busy machine does not count, and of the whole method, also where budgets share a measurement
that ran once. Rows are kept in DIR/peers.jsonl as they come, and not repeated; --table only collects.
"""

import argparse
import copy
import functools
from collections.abc import Callable
from pathlib import Path

from classifiers import FLAGS, Draw, collected, measure_missing, over_tasks, stored
from dependency_pruning import dependency_pruned, magnitude, taylor
from retraining_free import retraining_free
from transformers.utils import logging

from collab_heads import compress, distill, prune_heads
from collab_heads.analysis import head_importance
from common import ATTENTION, WORK, table, write

TASKS = ("mrpc", "stsb", "rte", "cola")
BUDGETS = (0.5, 0.33, 0.25)  # 36, 24 and 18 of 72 heads
EXAMPLES = 2048
COLUMNS = {"task": "", "method": "", "budget": "", "attention": ".3f", "score": ".2f", "lost": ".2f", "losses": ""}
COLUMNS |= {"f1": ".2f", "cpu_seconds": ".1f"}


def per_layer(scores, count: int) -> dict[str, list[int]]:
    """Keep the heads with the highest scores, equally many in every layer: path -> list of 0 and 1."""
    alive = {}
    for path, values in scores.items():
        best = values.topk(count).indices.tolist()
        alive[path] = [int(head in best) for head in range(len(values))]
    return alive


def our_heads(model, draw: Draw, budget: float):
    """Remove, with `prune_heads`, the heads that the others replace best, equally many per layer, and refit W_O."""
    measure = functools.partial(head_importance, model, draw.unlabelled, criterion="reconstruction")
    scores = draw.once("reconstruction", measure)
    alive = per_layer(scores, round(budget * model.config.num_attention_heads))
    removed = {path: [head for head, stays in enumerate(heads) if not stays] for path, heads in alive.items()}
    prune_heads(model, heads=removed, batches=draw.unlabelled)
    return model


def compressed(model, draw: Draw, budget: float, steps: int = 0):
    """Apply `compress` on a quarter of the examples, then optionally distil for some steps on all of them."""
    original = copy.deepcopy(model)
    compress(model, draw.unlabelled[::4], budget, parts=ATTENTION, seed=draw.number)
    if steps:
        distill(model, original, draw.unlabelled, steps, seed=draw.number)
    return model


METHODS: dict[str, Callable] = {  # method(model, draw, budget) -> the smaller model
    "Torch-Pruning, magnitude": functools.partial(dependency_pruned, importance=magnitude, everywhere=False),
    "Torch-Pruning, magnitude, over layers": functools.partial(
        dependency_pruned, importance=magnitude, everywhere=True
    ),
    "Torch-Pruning, Taylor": functools.partial(dependency_pruned, importance=taylor, everywhere=False),
    "Torch-Pruning, Taylor, over layers": functools.partial(dependency_pruned, importance=taylor, everywhere=True),
    "Kwon et al. 2022": functools.partial(retraining_free, everywhere=True),
    "Kwon et al. 2022, per layer": functools.partial(retraining_free, everywhere=False),
    "prune_heads, reconstruction": our_heads,
    "compress": compressed,
    "compress, distilled": functools.partial(compressed, steps=300),
}


def attention_parameters(model) -> int:
    """Return the number of parameters in the attention blocks, without their layer norms."""
    named = (item for layer in model.base_model.encoder.layer for item in layer.attention.named_parameters())
    return sum(parameter.numel() for name, parameter in named if "LayerNorm" not in name)


SIZES = {"attention": attention_parameters}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--draws", type=int, default=3, help="draws of examples")
    parser.add_argument("--work", type=Path, default=WORK / "glue", help="where the models and rows are")
    parser.add_argument("--table", action="store_true", help="collect only")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    place = arguments.work / "peers.jsonl"
    if not arguments.table:
        methods = {name: METHODS[name] for name in arguments.methods}
        draws = range(arguments.draws)
        measure_missing(place, arguments.tasks, methods, BUDGETS, draws, EXAMPLES, SIZES)
    rows = stored(place)
    found = collected(rows, SIZES)
    found += over_tasks(found, TASKS, SIZES)
    print(table(found, COLUMNS))
    write("peers", found, flags=FLAGS, runs=rows)


if __name__ == "__main__":
    main()
