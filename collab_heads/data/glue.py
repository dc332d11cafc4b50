"""Load examples for classification and regression: from the Hub, GLUE's TSV files, or the user's own files."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collab_heads.data.glue_tasks import AX, DIAGNOSTIC, LAYOUTS, TASKS, Task
from collab_heads.data.tables import Row, check_columns, read_table, read_tsv, text_of
from collab_heads.errors import DataError


@dataclass(frozen=True)
class Data:
    """A task and its examples: split ("train", "validation...", "test...") -> columns of the texts and "label"."""

    task: Task
    splits: Mapping[str, Mapping[str, list]]

    def named(self, name: str) -> list[str]:
        """Return the splits of "train", "validation" or "test": MNLI has two of each of the last two."""
        return [split for split in self.splits if split.split("_")[0] == name]

    def first(self, limits: Mapping[str, int | None]) -> "Data":
        """Return only the first examples; `limits`: "train", "validation" or "test" -> how many, or None for all."""
        splits = {
            split: {name: column[: limits.get(split.split("_")[0])] for name, column in columns.items()}
            for split, columns in self.splits.items()
        }
        return Data(self.task, splits)


def from_folder(name: str, folder: str | Path, *, test: bool = False, skip_bad_rows: bool = False) -> Data:
    """Read a task from GLUE's TSV files.

    Args:
        name: of the task.
        folder: the GLUE folder with a folder per task, or the folder of this task.
        test: read the test files, too.
        skip_bad_rows: leave out rows with a wrong number of fields, but not in test files, whose rows are numbered.

    Raises:
        DataError: if a file is missing, malformed, empty, or has a label that the task does not know.
    """
    task, layout, folder = TASKS[name], LAYOUTS[name], Path(folder)
    if (folder / layout.folder).is_dir():
        folder = folder / layout.folder
    if not (folder / "train.tsv").is_file():
        raise DataError(f"{folder}: no train.tsv here or in {layout.folder}/: expected the GLUE files of {name}")
    splits, files = {}, layout.splits(test)
    if test and layout.diagnostic and (folder / DIAGNOSTIC).is_file():
        files[AX] = DIAGNOSTIC
    for split, file in files.items():
        labelled = not split.startswith("test")
        rows = read_tsv(folder / file, layout.header if labelled else None, skip_bad_rows and labelled)
        wanted = (*layout.texts, layout.label) if labelled else layout.texts
        check_columns(folder / file, rows, wanted)
        columns: dict[str, list] = {
            ours: [row[theirs] for row in rows] for ours, theirs in zip(task.texts, layout.texts, strict=True)
        }
        if labelled:
            names = task.labels if layout.by_name else [str(i) for i in range(len(task.labels))]
            columns["label"] = parse_labels(folder / file, rows, layout.label, names)
        splits[split] = columns
    return Data(task, splits)


def parse_labels(path: str | Path, rows: Sequence[Row], column: str, names: Sequence[str]) -> list[int | float]:
    """Return labels as class numbers, or as floats if there are no class names.

    Raises:
        DataError: on another label; the message names the file, the example and what is allowed.
    """
    labels: list[int | float] = []
    for number, row in enumerate(rows, 1):
        text = str(row[column]).strip()
        if names and text in names:
            labels.append(list(names).index(text))
            continue
        try:
            value = float("nan") if names else float(text)
        except ValueError:
            value = float("nan")
        if not math.isfinite(value):
            allowed = ", ".join(names) or "a finite number"
            raise DataError(f"{path}, example {number}: label {text!r:.80} in column {column!r}; allowed: {allowed}")
        labels.append(value)
    return labels


def from_hub(name: str, *, test: bool = False) -> Data:
    """Load a task from nyu-mll/glue with `datasets`; needs the network, or its cache.

    Raises:
        DataError: if it cannot be loaded.
    """
    import datasets

    task, layout = TASKS[name], LAYOUTS[name]
    try:
        loaded = datasets.load_dataset("nyu-mll/glue", name)
        splits = {}
        for split in layout.splits(test):
            names = (*task.texts, "label") if not split.startswith("test") else task.texts
            splits[split] = {column: list(loaded[split][column]) for column in names}
        if test and layout.diagnostic:
            diagnostic = datasets.load_dataset("nyu-mll/glue", "ax")["test"]
            splits[AX] = {column: list(diagnostic[column]) for column in task.texts}
        return Data(task, splits)
    except Exception as error:  # whatever network, hub or cache raise
        raise DataError(
            f"cannot load nyu-mll/glue, {name}, from the Hub ({type(error).__name__}: {error}); "
            "with the files at hand pass --data_dir"
        ) from error


def from_files(
    train: str, validation: str, test: str | None = None, label: str = "label", skip_bad_rows: bool = False
) -> Data:
    """Read a task from the user's own files: a label column, and one or two columns of text.

    The texts are `sentence1` and `sentence2` where they exist, else the first one or two other columns. Labels that
    are all numbers with a fraction make a regression; anything else makes classes, sorted by name.

    Raises:
        DataError: if a file is malformed, columns are missing, or a label was not seen in training.
    """
    files = {"train": train, "validation": validation} | ({"test": test} if test else {})
    tables = {split: read_table(path, skip_bad_rows and split != "test") for split, path in files.items()}
    check_columns(train, tables["train"], [label])
    others = [name for name in tables["train"][0] if name not in (label, "idx", "id", "index")]
    texts = [name for name in ("sentence1", "sentence2") if name in others] or others[:2]
    if not texts:
        raise DataError(f"{train} has no column of text beside {label!r}")
    values = [row[label] for row in tables["train"]]
    names = [] if is_regression(values) else sort_labels({t.strip() for t in texts_of(train, tables["train"], label)})
    if len(names) == 1:
        raise DataError(f"{train}: all examples have the label {names[0]!r}: there is nothing to learn")
    splits: dict[str, dict[str, list]] = {}
    for split, rows in tables.items():
        check_columns(files[split], rows, texts if split == "test" else [*texts, label])
        splits[split] = {name: texts_of(files[split], rows, name) for name in texts}
        if split != "test":
            splits[split]["label"] = parse_labels(files[split], rows, label, names)
    return Data(Task(None, tuple(texts), tuple(names), "classification" if names else "regression"), splits)


def texts_of(path: str | Path, rows: Sequence[Row], column: str) -> list[str]:
    """Return a column as text; raise DataError if a field is neither text nor a number."""
    return [text_of(row[column], f"{path}, row {number}, column {column!r}") for number, row in enumerate(rows, 1)]


def is_regression(labels: Sequence) -> bool:
    """Return True if all labels are numbers, and some have a fraction or are written with one ("3.0")."""
    try:
        numbers = [float(label) for label in labels]
    except (TypeError, ValueError, OverflowError):
        return False
    return any(isinstance(raw, float) or "." in str(raw) or n % 1 for raw, n in zip(labels, numbers, strict=True))


def sort_labels(names: set[str]) -> list[str]:
    """Sort by number if all names are numbers, else by name."""
    numbers = all(name.lstrip("-").isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name) if numbers else 0, name))
