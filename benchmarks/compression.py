r"""Compress attention, or layers, to a share of their parameters, without labels: closed form, refined, distilled.

    python benchmarks/compression.py minilm [--draws 3] [--steps 300]
    python benchmarks/compression.py marian t5 [--draws 3] [--steps 300] [--sentences N]
    python benchmarks/compression.py minilm --parts layers --calibration 2048 [--draws 3]
    python benchmarks/compression.py marian --parts heads --budgets 0.25 [--steps 1200]
    python benchmarks/compression.py minilm marian --parts layers --calibration 2048 --draws 1 --budgets 0.5 \
        --methods refined --shape uniform
    python benchmarks/compression.py --table

all-MiniLM-L6-v2 is scored on STS-B dev (all 1,500 pairs, Spearman x 100, mean-pooled cosine) and on SST-2, of which
calibration never saw anything: accuracy x 100 of a logistic regression on frozen embeddings (1,500 train sentences,
1,872 others). It is also scored by retrieval in RTE (see `retrieval`), of which it saw nothing, either; rows from
before that have none, and learned from sentences of RTE, too. Translation models are scored on test_2016_flickr, BLEU
with beam 5. A draw is 256 sentences of STS-B train, or 256 training pairs, and the seed of all that follows; of more
sentences, some of STS-B and MRPC train, or so many pairs. Distillation sees sentences without labels: 10,000 of STS-B
and MRPC train, or the German side of the training pairs and what the original makes of it.
Every row is kept as it comes, in WORK/compression.jsonl, which begins with the stored rows. A row that is there is not
measured again: delete it there if it should be.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import get_args

import sacrebleu
import torch
from distillation import sentences
from retrieval import Retrieval
from sklearn.linear_model import LogisticRegression
from stsb import Task
from transformers import AutoModel, AutoTokenizer, PreTrainedModel
from transformers.utils import logging
from translation import MODELS, calibration, load, read, translate

from collab_heads import compress, distill
from collab_heads.base.option_values import SITE_PARTS, ModelShape
from collab_heads.running.embeddings import embed
from common import ATTENTION, RowStore, minilm, shared

FEW = 256  # sentences to calibrate on
PROBE, OTHERS = 1500, 1000  # sentences that a classifier is fitted to, and that it is asked about
METHODS = ("closed form", "refined", "distilled")
BUDGETS = {"minilm": (0.5, 0.33, 0.25), "marian": (0.75, 0.5, 0.33), "t5": (0.75, 0.5, 0.33)}
SCORES = {"score": "lost", "elsewhere": "lost elsewhere", "retrieval": "lost in retrieval"}  # of a sentence encoder
COLUMNS = {
    "model": "",
    "parts": "",
    "shape": "",
    "budget": "",
    "method": "",
    "steps": "",
    "sentences": "",
    "lost": ".2f",
    "losses": "",
    "lost elsewhere": ".2f",
    "lost in retrieval": ".2f",
    "cache": ".2f",
    "heads": "",
    "predicted": ".3f",
    "error": ".3f",
    "seconds": ".0f",
}


def parts_of(named: Sequence[str] | None) -> Sequence[str]:
    """Return the parts that the flag names; in stored rows "all" are those of attention."""
    return SITE_PARTS if named == ["layers"] else named or ATTENTION


class SentenceEncoder:
    """The task of compressing a sentence encoder: model, data and scores.

    Args:
        folder: of the model; None for all-MiniLM-L6-v2.
    """

    def __init__(self, folder: str | None = None):
        self.folder = folder or minilm()
        self.task = Task(self.folder)
        self.probe, self.labels = self.probe_sentences()
        self.retrieval = Retrieval(self.task)
        self.foreign |= self.retrieval.texts

    def probe_sentences(self) -> tuple[list[dict], torch.Tensor]:
        """Tokenize SST-2: 1,500 training sentences to fit a classifier to, then 1,000 others and the dev set."""
        rows = []
        for split, count in (("train", PROBE + OTHERS), ("dev", None)):
            _, *lines = shared(f"data/glue/SST-2/{split}.tsv").read_text(encoding="utf-8").rstrip("\n").split("\n")
            if count:
                order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0)).tolist()
                lines = [lines[i] for i in order[:count]]
            rows += [line.rsplit("\t", 1) for line in lines]
        self.foreign = {text.strip() for text, _ in rows}
        return self.task.tokenized([text for text, _ in rows], 64), torch.tensor([int(label) for _, label in rows])

    def load(self):
        return AutoModel.from_pretrained(self.folder).eval()

    def batches(self, draw: int, count: int) -> list[dict]:
        """Return a draw of calibration batches."""
        return self.task.calibration(draw) if count == FEW else self.task.tokenized(self.texts(draw)[:count], 32)

    def unlabelled(self, draw: int) -> list[dict]:
        """Return a draw of batches for distillation."""
        return self.task.tokenized(self.texts(draw), 32)

    def texts(self, draw: int) -> list[str]:
        """Return a draw of sentences, of which none may be among those of the other domains."""
        found = sentences(draw, ("MRPC",))
        if seen := self.foreign.intersection(text.strip() for text in found):
            sys.exit(f"{len(seen)} sentences to learn from are among those that are scored as other domains'")
        return found

    def score(self, model) -> float:
        """Return Spearman's correlation x 100 on STS-B dev."""
        return float(self.task.score(model))

    def score_elsewhere(self, model) -> float:
        """Return the accuracy x 100 of a classifier on the embeddings of SST-2."""
        return self.accuracy(self.answers(model))

    def answers(self, model) -> torch.Tensor:
        """Return what a classifier, fitted to embeddings of SST-2, makes of the sentences that it did not see."""
        rows = embed(model, self.probe)
        classifier = LogisticRegression(max_iter=1000).fit(rows[:PROBE], self.labels[:PROBE])
        return torch.as_tensor(classifier.predict(rows[PROBE:]))

    def accuracy(self, answers: torch.Tensor) -> float:
        """Return the share of right answers x 100."""
        return 100 * float((answers == self.labels[PROBE:]).double().mean())

    def scores(self, model) -> dict[str, float]:
        """Return all scores."""
        found = {"score": self.score(model), "elsewhere": self.score_elsewhere(model)}
        return found | {"retrieval": self.retrieval.score(model)}


class Translator:
    """The task of compressing a small translation model of Multi30k, German to English: model, data and score."""

    def __init__(self, name: str, arguments: argparse.Namespace):
        self.name = name
        self.tokenizer = AutoTokenizer.from_pretrained(shared(MODELS[name]))
        self.sources, self.references = (read("test_2016_flickr", side, arguments.sentences) for side in ("de", "en"))

    def load(self):
        return load(MODELS[self.name])

    def batches(self, draw: int, count: int) -> list[dict]:
        """Return a draw of calibration batches."""
        return calibration(self.tokenizer, draw, count=count)

    def unlabelled(self, draw: int) -> list[dict]:
        """Return a draw of batches for distillation, without targets."""
        return [
            {name: tensor for name, tensor in batch.items() if name != "labels"}
            for batch in calibration(self.tokenizer, 1000 + draw, count=10_000)
        ]

    def score(self, model) -> float:
        """Return BLEU."""
        return sacrebleu.corpus_bleu(translate(model, self.tokenizer, self.sources), [self.references]).score

    def score_elsewhere(self, model) -> None:
        """Return None: there is no second test set."""

    def scores(self, model) -> dict[str, float]:
        """Return the only score."""
        return {"score": self.score(model)}


def task_of(name: str, arguments: argparse.Namespace) -> SentenceEncoder | Translator:
    return SentenceEncoder() if name == "minilm" else Translator(name, arguments)


def measure(name: str, arguments: argparse.Namespace, done: Sequence[dict]) -> Iterator[dict]:
    """Yield the rows that are not measured yet: one per draw, budget and method."""
    task, known = task_of(name, arguments), {key(row) for row in done}
    row = {"model": name, "parts": "all", "draw": 0, "budget": 1.0, "method": "original", "steps": 0}
    if key(row) not in known:
        model = task.load()
        yield row | {"parameters": model.num_parameters()} | task.scores(model)
    for draw in range(arguments.draws):
        wanted = [
            {
                "model": name,
                "parts": ", ".join(arguments.parts or ["all"]),
                "shape": arguments.shape,
                "sentences": arguments.calibration,
                "draw": draw,
                "budget": budget,
                "method": method,
                "steps": arguments.steps if method == "distilled" else 0,
            }
            for budget in arguments.budgets or BUDGETS[name]
            for method in arguments.methods
        ]
        missing = [row for row in wanted if key(row) not in known]
        if not missing:
            continue
        refined: dict[float, tuple[PreTrainedModel, dict, float]] = {}  # budget -> a model to distil, numbers, seconds
        for row in missing:
            started = time.perf_counter()
            if row["steps"] and row["budget"] in refined:
                model, made, seconds = refined[row["budget"]]
                started -= seconds
            else:
                model, steps = task.load(), 0 if row["method"] == "closed form" else 120
                more = {
                    "parts": parts_of(arguments.parts),
                    "refine_steps": steps,
                    "seed": draw,
                    "shape": arguments.shape,
                }
                made = numbers(compress(model, task.batches(draw, arguments.calibration), row["budget"], **more))
            row |= made
            if row["steps"]:
                report = distill(model, task.load(), task.unlabelled(draw), row["steps"], seed=draw)
                row["distilled"] = report.to_dict()
            row["seconds"] = time.perf_counter() - started
            if row["method"] == "refined":
                refined = {row["budget"]: (model, made, row["seconds"])}
            yield row | task.scores(model)


def key(row: dict) -> tuple:
    """Return what identifies a row."""
    return (
        row.get("sentences", FEW),
        row.get("shape"),
        *(row[name] for name in ("model", "parts", "draw", "budget", "method", "steps")),
    )


def numbers(report) -> dict:
    """Return the numbers that a compression report contributes to its row."""
    return {
        "share": report.costs["parameters"].share,
        "parameters": report.model_parameters_after,
        "cache": report.costs["cache"].share,
        "heads": sum(site.sizes["heads"][1] for site in report.sites if "heads" in site.sizes),
        "predicted": report.predicted_error,
        "error": report.measured_error,
    }


def order(row: dict) -> tuple:
    """Return the sort key of a row in the table."""
    place = list(BUDGETS).index(row["model"]), row["parts"], row.get("shape") or "", -row["budget"]
    return *place, row.get("sentences", FEW), row["draw"]


def over_draws(rows: Sequence[dict]) -> list[dict]:
    """Return a row per model, budget and method: means over the draws, and the loss of each draw."""
    originals = {row["model"]: row for row in rows if row["method"] == "original"}
    groups: dict[tuple, list[dict]] = {}
    for row in sorted(rows, key=order):
        named = (row[name] for name in ("model", "parts", "budget", "method", "steps"))
        groups.setdefault((*named, row.get("sentences", FEW), row.get("shape")), []).append(row)
    found = []
    for (model, parts, budget, method, steps, count, shape), group in groups.items():
        original = originals[model]
        losses = [original["score"] - row["score"] for row in group]
        new = {"model": model, "parts": parts, "budget": budget, "method": method, "steps": steps}
        new["score"] = statistics.mean(row["score"] for row in group)
        new["parameters"] = round(statistics.mean(row["parameters"] for row in group))
        if method != "original":
            new |= {"sentences": count, "shape": shape}
            new |= {"lost": statistics.mean(losses), "losses": ", ".join(f"{loss:.2f}" for loss in losses)}
            new |= {name: statistics.mean(r[name] for r in group) for name in ("cache", "heads", "predicted", "error")}
            new["seconds"] = statistics.median(row["seconds"] for row in group)
        for name, lost in SCORES.items():
            if name != "score" and all(row.get(name) is not None for row in (original, *group)):
                new[name] = statistics.mean(row[name] for row in group)
                new[lost] = original[name] - new[name]
        found.append(new | {"draws": len(group)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {', '.join(BUDGETS)}")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=[*SITE_PARTS, "layers"],
        help="what may become smaller: some parts, or whole layers (default: all parts of attention)",
    )
    parser.add_argument(
        "--shape", choices=get_args(ModelShape), help="of the sizes in a model (default: that of compress)"
    )
    parser.add_argument("--budgets", nargs="+", type=float, help="shares (default: three, by model)")
    parser.add_argument("--calibration", type=int, default=FEW, metavar="N", help="sentences, or pairs, of a draw")
    parser.add_argument("--draws", type=int, default=3, help="of calibration sentences")
    parser.add_argument("--steps", type=int, default=300, help="of distillation")
    parser.add_argument("--sentences", type=int, help="to translate")
    parser.add_argument("--table", action="store_true", help="only make the table of what is there")
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - set(BUDGETS):
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    logging.disable_progress_bar()
    store = RowStore("compression")
    for name in arguments.models:
        for row in measure(name, arguments, store.rows):
            store.add(row)
            print({key: value for key, value in row.items() if key != "distilled"}, flush=True)
    if store.rows:
        store.write(over_draws(store.rows), COLUMNS)


if __name__ == "__main__":
    main()
