"""Fine-tuned classifiers that methods make smaller: tasks, draws of examples, rows kept in a file, and their table.

all-MiniLM-L6-v2 is fine-tuned by run_glue.py (FLAGS) on each task, once. Scores are of the dev set, x 100.
"""

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from resampling import lost_interval
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from collab_heads.data.classification import Labels, calibration_batches, draw, encode, predict
from collab_heads.data.glue import from_folder
from collab_heads.data.metrics import glue_metric
from common import ROOT, minilm, shared

sys.path.insert(0, str(ROOT))
import run_glue

FLAGS = (
    "--group_by_length --per_device_train_batch_size 16 --per_device_eval_batch_size 32 --learning_rate 5e-5 "
    "--warmup_ratio 0.06 --num_train_epochs 3 --seed 42 --overwrite_output_dir"
)
METRICS = {"mrpc": "accuracy", "stsb": "spearmanr", "rte": "accuracy", "cola": "matthews_correlation"}
METRICS |= {"sst2": "accuracy"}
MOST = 8000  # training examples that are read without labels
FIRST = {"sst2": 8000}  # training examples of a task, where not all of them


class Draw:
    """A draw of labelled training examples, with a cache of measurements on them.

    Attributes:
        number: of the draw, and its seed.
        batches: inputs with labels, as the model takes them, examples of similar length together.
        more: makes batches of many more training examples; None if there are no more.
    """

    def __init__(self, number: int, batches: Sequence[Mapping], more: Callable[[], Sequence[Mapping]] | None = None):
        self.number, self.batches, self.more = number, batches, more
        self.known: dict[str, tuple] = {}
        self.saved = 0.0  # seconds that cached measurements would have cost again

    @property
    def examples(self) -> int:
        """The number of examples."""
        return sum(len(batch["labels"]) for batch in self.batches)

    @property
    def unlabelled(self) -> list[dict]:
        """Return the batches without labels."""
        return without_labels(self.batches)

    @property
    def unlabelled_of_all(self) -> list[dict]:
        """Return batches of all training examples, or of the first `MOST` of a random order, without labels."""
        return without_labels(self.more() if self.more else self.batches)

    def once(self, name: str, measure: Callable):
        """Return a measurement that does not depend on the budget; it is made at the first call and cached by name."""
        if name in self.known:
            self.saved += self.known[name][1]
        else:
            start = time.process_time()
            self.known[name] = measure(), time.process_time() - start
        return self.known[name][0]


def without_labels(batches: Sequence[Mapping]) -> list[dict]:
    """Return batches without labels."""
    return [{name: value for name, value in batch.items() if name != "labels"} for batch in batches]


class Task:
    """A GLUE task with its fine-tuned model."""

    def __init__(self, name: str, work: Path):
        self.name, self.folder = name, work / name
        data = from_folder(name, shared("data/glue")).first({"train": FIRST.get(name)})
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        labels = Labels.of(data.task, self.load().config)
        self.encoded = encode(data, tokenizer, labels, 128, pad=False)
        self.collate = DataCollatorWithPadding(tokenizer)
        self.labels, self.data = labels, data

    def load(self):
        """Load the fine-tuned model."""
        return AutoModelForSequenceClassification.from_pretrained(self.folder).eval()

    def draw(self, number: int, count: int) -> Draw:
        """Return a draw of training examples."""

        def batches(count: int) -> list[dict]:
            return calibration_batches(draw(self.encoded["train"], count, number), self.collate, labels=True)

        return Draw(number, batches(count), lambda: batches(MOST))

    def predictions(self, model) -> np.ndarray:
        """Return the class or the score of every example of the dev set."""
        outputs = self.labels.to_task(predict(Accelerator(), model, self.encoded["validation"], self.collate, 32))
        return outputs.argmax(-1) if self.data.task.labels else outputs

    @functools.cached_property
    def before(self) -> np.ndarray:
        """The predictions of the fine-tuned model."""
        return self.predictions(self.load())

    def scores(self, model) -> dict:
        """Return all metrics on the dev set, x 100, and the 95 % interval of the loss in the main one."""
        found, references = self.predictions(model), np.array(self.data.splits["validation"]["label"])
        values = glue_metric(self.name).compute(predictions=found, references=references)
        interval = lost_interval(METRICS[self.name], self.before, found, references)
        return {"metrics": {name: 100 * value for name, value in values.items()}, "interval": interval}


def trained(name: str, work: Path) -> None:
    """Fine-tune the model of a task, unless it exists."""
    if not (work / name / "all_results.json").exists():
        places = ["--data_dir", str(shared("data/glue")), "--model_name_or_path", minilm()]
        first = ["--max_train_samples", str(FIRST[name])] if name in FIRST else []
        run_glue.main(["--task_name", name, *FLAGS.split(), *first, *places, "--output_dir", str(work / name)])


Sizes = Mapping[str, Callable]  # what is reported as a share of the original: name -> size(model)


def measured(task: Task, draw: Draw, methods: Mapping[str, Callable], name: str, budget: float, sizes: Sizes) -> dict:
    """Return one row: the shares that are left, processor seconds, and metrics.

    Args:
        task: the task.
        draw: examples.
        methods: name -> method(model, draw, budget), which returns the smaller model.
        name: of the method.
        budget: the share that may be left.
        sizes: what is reported as a share of the original.
    """
    model, numbers = made_smaller(task.load(), draw, methods[name], budget, sizes)
    row = {"task": task.name, "method": name, "budget": budget, "draw": draw.number, "examples": draw.examples}
    return row | numbers | task.scores(model)


def made_smaller(model, draw: Draw, method: Callable, budget: float, sizes: Sizes) -> tuple:
    """Apply a method; return the smaller model, and the shares that are left with the processor seconds it took."""
    whole = {name: size(model) for name, size in sizes.items()}
    draw.saved, start = 0.0, time.process_time()
    model = method(model, draw, budget)
    seconds = time.process_time() - start + draw.saved
    return model, {name: size(model) / whole[name] for name, size in sizes.items()} | {"cpu_seconds": seconds}


def measure_missing(
    place: Path,
    tasks: Iterable[str],
    methods: Mapping[str, Callable],
    budgets: Sequence[float],
    draws: Iterable[int],
    examples: int,
    sizes: Sizes,
) -> None:
    """Measure what a file of rows lacks, and append it; the first draw of all tasks comes first.

    Args:
        place: the file of rows, beside the folders of the fine-tuned models.
        tasks: names of tasks.
        methods: name -> method(model, draw, budget), which returns the smaller model.
        budgets: shares.
        draws: numbers of draws.
        examples: how many a draw has.
        sizes: what is reported as a share of the original.
    """
    done = {key(row) for row in stored(place)}

    def keep(row: dict) -> None:
        with place.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print({name: round(v, 3) if isinstance(v, float) else v for name, v in row.items()}, flush=True)

    for number in draws:
        for name in tasks:
            wanted = [(name, method, budget, number) for budget in budgets for method in methods]
            missing = [each for each in wanted if each not in done]
            if not missing:
                continue
            trained(name, place.parent)
            task = Task(name, place.parent)
            if (name, "original", 1.0, 0) not in done:
                done.add((name, "original", 1.0, 0))
                row = {"task": name, "method": "original", "budget": 1.0, "draw": 0}
                keep(row | task.scores(task.load()))
            drawn = task.draw(number, examples)
            for _, method, budget, _ in sorted(missing, key=lambda each: list(methods).index(each[1])):
                keep(measured(task, drawn, methods, method, budget, sizes))


def stored(place: Path) -> list[dict]:
    """Return the rows of a file; none if it does not exist."""
    return [json.loads(line) for line in place.read_text().splitlines()] if place.exists() else []


def key(row: Mapping) -> tuple:
    """Return what identifies a row."""
    return row["task"], row["method"], row["budget"], row["draw"]


def collected(rows: Sequence[Mapping], sizes: Iterable[str]) -> list[dict]:
    """Return the table: means over draws, by task and budget; of the shares under these names, too."""
    groups: dict[tuple, list] = {}
    for row in rows:
        groups.setdefault((list(METRICS).index(row["task"]), -row["budget"], row["method"]), []).append(row)
    found = []
    for _, group in sorted(groups.items(), key=lambda item: item[0][:2]):
        task, method = group[0]["task"], group[0]["method"]
        group = sorted(group, key=lambda row: row["draw"])
        scores = [row["metrics"][METRICS[task]] for row in group]
        if method == "original":  # the first of its task
            before = scores[0]
        line = {"task": task, "method": method, "budget": group[0]["budget"], "score": statistics.mean(scores)}
        line |= {name: mean_of(group, name) for name in (*sizes, "examples", "cpu_seconds")}
        line["f1"] = mean_of([row["metrics"] for row in group], "f1")
        if method != "original":
            line |= {"lost": before - line["score"], "losses": ", ".join(f"{before - score:.2f}" for score in scores)}
            line["intervals"] = ", ".join("{:.1f} to {:.1f}".format(*r["interval"]) for r in group if "interval" in r)
        found.append(line)
    return found


def over_tasks(lines: Sequence[Mapping], tasks: Iterable[str], sizes: Iterable[str]) -> list[dict]:
    """Return means over some tasks, for methods that were run on all of them, by budget."""
    tasks = [task for task in METRICS if task in tasks]
    lines = [line for line in lines if line["task"] in tasks and line["method"] != "original"]
    pairs, means = dict.fromkeys((line["budget"], line["method"]) for line in lines), []
    for budget, method in sorted(pairs, key=lambda pair: -pair[0]):
        those = [line for line in lines if (line["budget"], line["method"]) == (budget, method)]
        if len(those) == len(tasks):
            means.append({"task": f"mean of {', '.join(tasks)}", "method": method, "budget": budget})
            means[-1] |= {name: mean_of(those, name) for name in ("score", *sizes, "lost", "cpu_seconds")}
    return means


def covered(lines: Sequence[Mapping]) -> list[set[str]]:
    """Return the sets of at least two tasks that some method was run on, the largest first."""
    tasks: dict[str, set[str]] = {}
    for line in lines:
        if line["method"] != "original":
            tasks.setdefault(line["method"], set()).add(line["task"])
    found = {frozenset(each) for each in tasks.values() if len(each) > 1}
    return [set(each) for each in sorted(found, key=lambda each: (-len(each), sorted(each)))]


def mean_of(rows: Sequence[Mapping], name: str) -> float | None:
    """Return the mean of the rows' values under a name; None if no row has one."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.mean(values) if values else None
