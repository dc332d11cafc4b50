r"""Compare `compress` with other methods on all-MiniLM-L6-v2 itself, a sentence encoder, at the same operations.

PYTHONPATH=SITE python benchmarks/encoder_peers.py [--methods ...] [--draws 0 1 2]
PYTHONPATH=SITE python benchmarks/encoder_peers.py --table

Only methods that need no labels can take part: of those of `layer_peers.py`, which says what SITE is, K-prune, GRAIL
and the magnitude of weights. K-prune's prediction is the vector of a sentence, its divergence the squared distance. A
draw is 2,048 sentences of STS-B and MRPC train. Nothing is trained. Scores are those of `compression.py`: STS-B dev,
which resembles the draws, and SST-2 and retrieval in RTE, which do not. Rows are kept as they come, in
WORK/encoder_peers.jsonl, and not repeated.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence

from classifiers import Draw, made_smaller
from compression import SCORES, SentenceEncoder
from grail import reconstructed
from k_prune import Prediction, distance, embeddings, k_pruned
from layer_peers import BUDGETS, METHODS, SIZES
from transformers.utils import logging

from common import RowStore

EXAMPLES = 2048
COLUMNS = {"method": "", "budget": "", "operations": ".3f", "lost": ".2f", "losses": "", "lost elsewhere": ".2f"}
COLUMNS |= {"lost in retrieval": ".2f", "draws": "", "cpu_seconds": ".0f"}
ENCODER_METHODS: dict[str, Callable] = {
    "Torch-Pruning, magnitude": METHODS["Torch-Pruning, magnitude"],
    "GRAIL": reconstructed,
    "K-prune": functools.partial(k_pruned, prediction=Prediction(embeddings, distance)),
    "compress": METHODS["compress"],
}
ONCE = ("Torch-Pruning, magnitude",)  # methods that do not look at data


def measure(store: RowStore, methods: Sequence[str], draws: Sequence[int]) -> None:
    """Measure what is missing."""
    task, done = SentenceEncoder(), {key(row) for row in store.rows}
    original = {"method": "original", "budget": 1.0, "draw": 0}
    if key(original) not in done:
        store.add(original | task.scores(task.load()))
    for number in draws:
        draw = Draw(number, task.batches(number, EXAMPLES))
        for name in methods:
            for budget in BUDGETS if not number or name not in ONCE else ():
                row = {"method": name, "budget": budget, "draw": number}
                if key(row) in done:
                    continue
                model, numbers = made_smaller(task.load(), draw, ENCODER_METHODS[name], budget, SIZES)
                row |= numbers | task.scores(model)
                store.add(row)
                print({name: round(v, 3) if isinstance(v, float) else v for name, v in row.items()}, flush=True)


def key(row: dict) -> tuple:
    """Return what identifies a row."""
    return row["method"], row["budget"], row["draw"]


def over_draws(rows: Sequence[dict]) -> list[dict]:
    """Return a row per budget and method: means over the draws, and the loss on STS-B in each."""
    (original,) = (row for row in rows if row["method"] == "original")
    found = [{name: original[name] for name in ("method", "budget", *SCORES)}]
    for budget in BUDGETS:
        for method in ENCODER_METHODS:
            group = [row for row in rows if (row["method"], row["budget"]) == (method, budget)]
            if not group:
                continue
            group.sort(key=lambda row: row["draw"])
            means = {name: statistics.mean(row[name] for row in group) for name in (*SCORES, *SIZES, "cpu_seconds")}
            lost = {lost: original[name] - means[name] for name, lost in SCORES.items()}
            losses = ", ".join(f"{original['score'] - row['score']:.2f}" for row in group)
            found.append({"method": method, "budget": budget, "draws": len(group)} | means | lost | {"losses": losses})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(ENCODER_METHODS), choices=ENCODER_METHODS)
    parser.add_argument("--draws", nargs="+", type=int, default=[0, 1, 2], help="numbers of draws")
    parser.add_argument("--table", action="store_true", help="only make the table of what is there")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    store = RowStore("encoder_peers")
    if not arguments.table:
        measure(store, arguments.methods, arguments.draws)
    store.write(over_draws(store.rows), COLUMNS)


if __name__ == "__main__":
    main()
