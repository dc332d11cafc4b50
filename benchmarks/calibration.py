r"""Measure how much text `compress` needs, and of what kind: all-MiniLM-L6-v2, whole layers, nothing trained.

    python benchmarks/calibration.py [--kinds pairs reviews ...] [--draws 1] [--counts 16 64 ...]
    python benchmarks/calibration.py --table

A draw is a number of sentences of one kind, and the seed of all that follows. One plan serves all budgets. The kinds
are STS-B train ("pairs"), SST-2 train ("reviews"), the English side of Multi30k train ("captions"), the UD English
treebank ("web"), and as many of each ("mixed"). Three tasks score a model, whose own sentences are in no draw: STS-B
dev, Spearman x 100; a logistic regression on frozen embeddings of SST-2, accuracy x 100; and retrieval in RTE, x 100:
how often the passage that entails a statement is the nearest of all such passages of the train and dev sets.
Every row is kept as it comes, in WORK/calibration.jsonl, which begins with the stored rows. A row that is there is not
measured again: delete it there if it should be.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import torch
from compression import SentenceEncoder
from stsb import pairs
from transformers.utils import logging

from collab_heads import plan
from common import RowStore, compressed_copy, lines_of

BUDGETS = (0.5, 0.25)  # of the layers' parameters
COUNTS = {  # kind -> sentences of its draws; each tells how much is needed, or of what kind
    "pairs": (16, 64, 256, 1024, 4096),
    "reviews": (256, 2048),
    "captions": (256, 2048),
    "web": (256, 2048),
    "mixed": (256, 2048),
}
SCORES = ("STS-B", "SST-2", "retrieval")
COLUMNS = {"kind": "", "sentences": "", "budget": "", "draws": "", "error": ".3f"}
COLUMNS |= {f"lost, {name}": ".2f" for name in SCORES} | {"seconds": ".0f"}


def sentences(kind: str) -> list[str]:
    """Return all sentences of a kind, each once."""
    if kind == "pairs":
        found = [text for first, second, _ in pairs("train") for text in (first, second)]
    elif kind == "reviews":  # many are phrases of one or two words
        found = [line.split("\t")[0].strip() for line in lines_of("data/glue/SST-2/train.tsv")[1:]]
        found = [text for text in found if len(text.split()) > 3]
    elif kind == "captions":
        found = lines_of("data/multi30k/train.en.gz")
    else:
        files = [f"data/ud_english_ewt/en_ewt-ud-{split}.conllu" for split in ("dev", "test")]
        marked = [line.partition("# text = ") for name in files for line in lines_of(name)]
        found = [text for before, mark, text in marked if mark and not before]
    return list(dict.fromkeys(found))


class Tasks(SentenceEncoder):
    """The tasks that score a model, and draws of sentences that are in none of them."""

    def __init__(self, folder: str | None = None):
        super().__init__(folder)
        dev = {text.strip() for first, second, _ in self.task.dev for text in (first, second)}
        self.seen = dev | self.foreign

    def kind(self, kind: str) -> list[str]:
        """Return the sentences of a kind that no task has."""
        return [text for text in sentences(kind) if text.strip() not in self.seen]

    def draw(self, kind: str, count: int, draw: int) -> list[dict]:
        """Return calibration batches."""
        kinds = [name for name in COUNTS if name != "mixed"] if kind == "mixed" else [kind]
        texts = []
        for name in kinds:
            found = self.kind(name)
            order = torch.randperm(len(found), generator=torch.Generator().manual_seed(draw)).tolist()
            texts.append([found[index] for index in order[: count // len(kinds)]])
            if len(texts[-1]) < count // len(kinds):
                sys.exit(f"{name} has {len(texts[-1])} sentences, {count // len(kinds)} are asked for")
        return self.task.tokenized([text for together in zip(*texts, strict=True) for text in together], 32)

    def scores(self, model) -> dict[str, float]:
        """Return all scores, x 100."""
        found = self.score(model), self.score_elsewhere(model), self.retrieval.score(model)
        return dict(zip(SCORES, found, strict=True))


def measure(arguments: argparse.Namespace, done: Sequence[dict]) -> Iterator[dict]:
    """Yield the rows that are not measured yet."""
    tasks, known = Tasks(), {key(row) for row in done}
    original = {"kind": "original", "sentences": 0, "draw": 0, "budget": 1.0}
    if key(original) not in known:
        yield original | tasks.scores(tasks.load())
    for draw in range(arguments.draws):
        for kind in arguments.kinds:
            for count in arguments.counts or COUNTS[kind]:
                row = {"kind": kind, "sentences": count, "draw": draw}
                missing = [budget for budget in BUDGETS if key(row | {"budget": budget}) not in known]
                if not missing:
                    continue
                started = time.process_time()
                made = plan(tasks.load(), tasks.draw(kind, count, draw), seed=draw)
                planned = time.process_time() - started
                for budget in missing:
                    started = time.process_time()
                    small, error = compressed_copy(made, budget)
                    seconds = planned + time.process_time() - started
                    yield row | {"budget": budget, "error": error, "seconds": seconds} | tasks.scores(small)


def key(row: dict) -> tuple:
    """Return what identifies a row."""
    return tuple(row[name] for name in ("kind", "sentences", "draw", "budget"))


def over_draws(rows: Sequence[dict]) -> list[dict]:
    """Return a row per kind, number of sentences and budget: means over the draws."""
    original = next(row for row in rows if row["kind"] == "original")
    groups: dict[tuple, list[dict]] = {}
    for row in sorted(rows, key=lambda row: (-row["budget"], ["original", *COUNTS].index(row["kind"]), row["draw"])):
        groups.setdefault((row["budget"], row["kind"], row["sentences"]), []).append(row)
    found = []
    for (budget, kind, count), group in groups.items():
        new = {"kind": kind, "sentences": count, "budget": budget, "draws": len(group)}
        for name in SCORES:
            new[name] = statistics.mean(row[name] for row in group)
            new[f"lost, {name}"] = original[name] - new[name]
        if kind != "original":
            new |= {name: statistics.mean(row[name] for row in group) for name in ("error", "seconds")}
        found.append(new)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=COUNTS, default=list(COUNTS), help="of sentences")
    parser.add_argument("--counts", nargs="+", type=int, help="of sentences (default: by kind)")
    parser.add_argument("--draws", type=int, default=1, help="of sentences")
    parser.add_argument("--table", action="store_true", help="only make the table of what is there")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    store = RowStore("calibration")
    for row in () if arguments.table else measure(arguments, store.rows):
        store.add(row)
        print(row, flush=True)
    if store.rows:
        store.write(over_draws(store.rows), COLUMNS)


if __name__ == "__main__":
    main()
