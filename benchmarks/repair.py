r"""Remove heads without any training, with W_O left as it is and refitted on what the other heads put out.

    python benchmarks/repair.py [--models minilm marian] [--draws 3] [--sentences N]

all-MiniLM-L6-v2 on STS-B dev (Spearman x 100) and the Marian of Multi30k on test_2016_flickr (BLEU, greedy). Heads are
chosen over the whole model, without labels ("reconstruction"), and for the Marian by the gradient of the loss, too.
Every role keeps at least one. Every draw has calibration sentences of its own: 256, of the training sets. Rows of
models that are not asked for stay as they are stored.
"""

import argparse
import statistics
from collections.abc import Iterator

import sacrebleu
from stsb import Task
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging
from translation import MODELS, calibration, load, read, translate

from collab_heads import prune_heads, swap_to_gated
from collab_heads.analysis import head_importance, most_important
from common import RowStore, minilm, shared, table

COLUMNS = {
    "model": "",
    "heads": "",
    "chosen by": "",
    "W_O": "",
    "score": ".2f",
    "lost": ".2f",
    "losses": "",
}
KEPT = (54, 36, 18)  # of 72


def pruned(model, alive, batches) -> None:
    """Remove heads in place; refit W_O if there are batches."""
    swap_to_gated(model, alive_heads=alive)
    prune_heads(model, batches=batches)


class Encoder:
    """The sentence encoder, its data and its score."""

    name, criteria = "minilm", ("reconstruction",)

    def __init__(self, sentences: int | None):
        self.task = Task()

    def load(self):
        return AutoModel.from_pretrained(minilm()).eval()

    def batches(self, draw: int) -> list[dict]:
        """Return a draw of calibration sentences."""
        return self.task.calibration(draw)

    def score(self, model) -> float:
        """Return Spearman's correlation x 100."""
        return self.task.score(model)


class Translator:
    """The translation model, its data and its score."""

    name, criteria = "marian", ("reconstruction", "gradient")

    def __init__(self, sentences: int | None):
        self.tokenizer = AutoTokenizer.from_pretrained(shared(MODELS["marian"]))
        self.sources, self.references = (read("test_2016_flickr", side, sentences) for side in ("de", "en"))

    def load(self):
        return load(MODELS["marian"])

    def batches(self, draw: int) -> list[dict]:
        """Return a draw of training pairs."""
        return calibration(self.tokenizer, draw)

    def score(self, model) -> float:
        """Return BLEU."""
        found = translate(model, self.tokenizer, self.sources, beams=1)
        return sacrebleu.metrics.BLEU().corpus_score(found, [self.references]).score


def rows_of(task: Encoder | Translator, draws: int) -> Iterator[dict]:
    """Yield the rows of one model."""
    whole = task.score(task.load())
    yield {"model": task.name, "heads": 72, "score": whole}
    for criterion in task.criteria:
        measured = []
        for draw in range(draws):
            batches = task.batches(draw)
            measured.append((batches, head_importance(task.load(), batches, criterion=criterion)))
        for kept in KEPT:
            for refitted in (False, True):
                scores = []
                for batches, importance in measured:
                    model = task.load()
                    pruned(model, most_important(model, importance, kept), batches if refitted else None)
                    scores.append(task.score(model))
                yield {
                    "model": task.name,
                    "heads": kept,
                    "chosen by": criterion,
                    "W_O": "refitted" if refitted else "as it was",
                    "score": statistics.mean(scores),
                    "lost": whole - statistics.mean(scores),
                    "losses": ", ".join(f"{whole - score:.2f}" for score in scores),
                }


TASKS = {"minilm": Encoder, "marian": Translator}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--draws", type=int, default=3, help="calibration draws")
    parser.add_argument("--sentences", type=int, help="the first sentences of the test set only")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    store = RowStore("repair")
    for name in arguments.models:
        for row in rows_of(TASKS[name](arguments.sentences), arguments.draws):
            store.add(row)
            print(table([row], COLUMNS).splitlines()[-1], flush=True)
    rows = store.newest(lambda row: tuple(row.get(name) for name in ("model", "heads", "chosen by", "W_O")))
    store.save(sorted(rows, key=lambda row: [*TASKS].index(row["model"])))


if __name__ == "__main__":
    main()
