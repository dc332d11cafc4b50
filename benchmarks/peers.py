"""What else makes the attention of a fine-tuned classifier smaller: Torch-Pruning and Kwon et al. 2022 beside our own.

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
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from accelerate import Accelerator
from dependency_pruning import dependency_pruned, magnitude, taylor
from repair import per_layer
from retraining_free import retraining_free
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding
from transformers.utils import logging

from collab_heads import compress, distill, head_importance, prune_heads
from collab_heads.data.classification import Labels, calibration_batches, draw, encode, predict
from collab_heads.data.glue import from_folder
from collab_heads.data.metrics import glue_metric
from common import ATTENTION, ROOT, WORK, minilm, shared, table, write

sys.path.insert(0, str(ROOT))
import run_glue

FLAGS = (
    "--group_by_length --per_device_train_batch_size 16 --per_device_eval_batch_size 32 --learning_rate 5e-5 "
    "--warmup_ratio 0.06 --num_train_epochs 3 --seed 42 --overwrite_output_dir"
)
METRICS = {"mrpc": "accuracy", "stsb": "spearmanr", "rte": "accuracy", "cola": "matthews_correlation"}
BUDGETS = (0.5, 0.33, 0.25)  # 36, 24 and 18 of 72 heads
EXAMPLES = 2048
COLUMNS = {"task": "", "method": "", "budget": "", "attention": ".3f", "score": ".2f", "lost": ".2f", "losses": ""}
COLUMNS |= {"f1": ".2f", "cpu_seconds": ".1f"}


class Draw:
    """A draw of labelled training examples, with a cache of measurements on them.

    Attributes:
        number: of the draw, and its seed.
        batches: inputs with labels, as the model takes them, examples of similar length together.
    """

    def __init__(self, number: int, batches: Sequence[Mapping]):
        self.number, self.batches = number, batches
        self.known: dict[str, tuple] = {}
        self.saved = 0.0  # seconds that cached measurements would have cost again

    @property
    def unlabelled(self) -> list[dict]:
        """Return the batches without labels."""
        return [{name: value for name, value in batch.items() if name != "labels"} for batch in self.batches]

    def once(self, name: str, measure: Callable):
        """Return a measurement that does not depend on the budget; it is made at the first call and cached by name."""
        if name in self.known:
            self.saved += self.known[name][1]
        else:
            start = time.process_time()
            self.known[name] = measure(), time.process_time() - start
        return self.known[name][0]


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


class Task:
    """A GLUE task with its fine-tuned model."""

    def __init__(self, name: str, work: Path):
        self.name, self.folder = name, work / name
        data = from_folder(name, shared("data/glue"))
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        labels = Labels.of(data.task, self.load().config)
        self.encoded = encode(data, tokenizer, labels, 128, pad=False)
        self.collate = DataCollatorWithPadding(tokenizer)
        self.labels, self.data = labels, data

    def load(self):
        """Load the fine-tuned model."""
        return AutoModelForSequenceClassification.from_pretrained(self.folder).eval()

    def draw(self, number: int) -> Draw:
        """Return a draw of training examples."""
        examples = draw(self.encoded["train"], EXAMPLES, number)
        return Draw(number, calibration_batches(examples, self.collate, labels=True))

    def metrics(self, model) -> dict[str, float]:
        """Return all metrics on the dev set, x 100."""
        outputs = self.labels.to_task(predict(Accelerator(), model, self.encoded["validation"], self.collate, 32))
        found = outputs.argmax(-1) if self.data.task.labels else outputs
        values = glue_metric(self.name).compute(predictions=found, references=self.data.splits["validation"]["label"])
        return {name: 100 * value for name, value in values.items()}


def trained(name: str, work: Path) -> None:
    """Fine-tune the model of a task, unless it exists."""
    if not (work / name / "all_results.json").exists():
        places = ["--data_dir", str(shared("data/glue")), "--model_name_or_path", minilm()]
        run_glue.main(["--task_name", name, *FLAGS.split(), *places, "--output_dir", str(work / name)])


def attention_parameters(model) -> int:
    """Return the number of parameters in the attention blocks, without their layer norms."""
    named = (item for layer in model.base_model.encoder.layer for item in layer.attention.named_parameters())
    return sum(parameter.numel() for name, parameter in named if "LayerNorm" not in name)


def measured(task: Task, draw: Draw, method: str, budget: float) -> dict:
    """Return one row: the share of attention that is left, processor seconds, and metrics."""
    model = task.load()
    whole, draw.saved, start = attention_parameters(model), 0.0, time.process_time()
    model = METHODS[method](model, draw, budget)
    seconds = time.process_time() - start + draw.saved
    share = attention_parameters(model) / whole
    row = {"task": task.name, "method": method, "budget": budget, "draw": draw.number, "attention": share}
    return row | {"cpu_seconds": seconds, "metrics": task.metrics(model)}


def run(tasks: Sequence[str], methods: Sequence[str], draws: int, work: Path) -> None:
    """Measure what is missing; the first draw of all tasks comes first."""
    place = work / "peers.jsonl"
    done = {key(row) for row in stored(place)}

    def keep(row: dict) -> None:
        with place.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print({name: round(v, 3) if isinstance(v, float) else v for name, v in row.items()}, flush=True)

    for number in range(draws):
        for name in tasks:
            trained(name, work)
            task = Task(name, work)
            if (name, "original", 1.0, 0) not in done:
                done.add((name, "original", 1.0, 0))
                keep(
                    {"task": name, "method": "original", "budget": 1.0, "draw": 0, "metrics": task.metrics(task.load())}
                )
            examples = task.draw(number)
            for method in methods:
                for budget in BUDGETS:
                    if (name, method, budget, number) not in done:
                        keep(measured(task, examples, method, budget))


def stored(place: Path) -> list[dict]:
    """Return the rows of a file; none if it does not exist."""
    return [json.loads(line) for line in place.read_text().splitlines()] if place.exists() else []


def key(row: Mapping) -> tuple:
    """Return what identifies a row."""
    return row["task"], row["method"], row["budget"], row["draw"]


def collected(rows: Sequence[Mapping]) -> list[dict]:
    """Return the table: means over draws, by task and budget."""
    groups: dict[tuple, list] = {}
    for row in rows:
        groups.setdefault((list(METRICS).index(row["task"]), -row["budget"], row["method"]), []).append(row)
    found = []
    for _, group in sorted(groups.items(), key=lambda item: item[0][:2]):
        task, method = group[0]["task"], group[0]["method"]
        scores = [row["metrics"][METRICS[task]] for row in group]
        if method == "original":  # the first of its task
            before = scores[0]
        line = {"task": task, "method": method, "budget": group[0]["budget"], "score": statistics.mean(scores)}
        line |= {name: mean_of(group, name) for name in ("attention", "cpu_seconds")}
        line["f1"] = mean_of([row["metrics"] for row in group], "f1")
        if method != "original":
            line |= {"lost": before - line["score"], "losses": ", ".join(f"{before - score:.2f}" for score in scores)}
        found.append(line)
    return [*found, *over_tasks(found)]


def over_tasks(lines: Sequence[Mapping]) -> list[dict]:
    """Return means over the tasks, for methods that were run on all of them."""
    pairs = dict.fromkeys((line["budget"], line["method"]) for line in lines if line["method"] != "original")
    means = []
    for budget, method in sorted(pairs, key=lambda pair: -pair[0]):
        those = [line for line in lines if (line["budget"], line["method"]) == (budget, method)]
        if len(those) == len(METRICS):
            names = ("score", "attention", "lost")
            means.append({"task": "mean of four", "method": method, "budget": budget})
            means[-1] |= {name: statistics.mean(line[name] for line in those) for name in names}
    return means


def mean_of(rows: Sequence[Mapping], name: str) -> float | None:
    """Return the mean of the rows' values under a name; None if no row has one."""
    values = [row[name] for row in rows if name in row]
    return statistics.mean(values) if values else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(METRICS), choices=METRICS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--draws", type=int, default=3, help="draws of examples")
    parser.add_argument("--work", type=Path, default=WORK / "glue", help="where the models and rows are")
    parser.add_argument("--table", action="store_true", help="collect only")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    if not arguments.table:
        run(arguments.tasks, arguments.methods, arguments.draws, arguments.work)
    rows = stored(arguments.work / "peers.jsonl")
    print(table(collected(rows), COLUMNS))
    write("peers", collected(rows), flags=FLAGS, runs=rows)


if __name__ == "__main__":
    main()
