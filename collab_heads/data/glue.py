"""Load examples for classification and regression: from the Hub, GLUE's TSV files, or the user's own files."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from collab_heads.base.checks import shortened
from collab_heads.data.glue_tasks import AX, DIAGNOSTIC, LAYOUTS, TASKS, Task
from collab_heads.data.tables import Row, check_columns, read_table, read_tsv, text_of
from collab_heads.errors import ArgumentError, DataError


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
            labels = [row[layout.label].strip() for row in rows]
            columns["label"] = parse_labels(folder / file, labels, layout.label, names)
        splits[split] = columns
    return Data(task, splits)


def parse_labels(path: str | Path, labels: Sequence[str], column: str, names: Sequence[str]) -> list[int | float]:
    """Return labels as class numbers, or as floats if there are no class names."""
    numbers: dict[str, int | float] = {name: number for number, name in enumerate(names)}
    parsed: list[int | float] = []
    for number, text in enumerate(labels, 1):
        try:
            value = numbers[text] if names else float(text)
        except (KeyError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            allowed = shortened(names) or "a finite number"
            raise DataError(f"{path}, example {number}: label {text!r:.80} in column {column!r}; allowed: {allowed}")
        parsed.append(value)
    return parsed


def from_hub(name: str, *, test: bool = False) -> Data:
    """Load a task from nyu-mll/glue with `datasets`; needs the network, or its cache."""
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
    train: str,
    validation: str,
    test: str | None = None,
    label: str = "label",
    skip_bad_rows: bool = False,
    texts: Sequence[str] | None = None,
) -> Data:
    """Read a task from the user's own files, and print what was read: a label column, and one or two columns of text.

    Args:
        train: the file of the training examples.
        validation: the file of the validation examples.
        test: the file of the test examples, which need no labels.
        label: the column of the labels. Numbers with a fraction make a regression, anything else makes classes, sorted
            by name. Up to 20 whole numbers that are written with a fraction ("1.0"), as pandas does after a missing
            label, are classes, too; more are a regression.
        skip_bad_rows: leave out rows with a wrong number of fields, but not in the test file.
        texts: the one or two columns of text; default: `sentence1` and `sentence2` where they exist, else the other
            columns, without numbers of rows (`id`, `idx`, `index`, and what pandas calls them) and names of the labels.
    """
    files = {"train": train, "validation": validation} | ({"test": test} if test else {})
    tables = {split: read_table(path, skip_bad_rows and split != "test") for split, path in files.items()}
    labels = {split: labels_of(path, tables[split], label) for split, path in files.items() if split != "test"}
    if label in (texts or ()):
        raise ArgumentError(f"--text_columns: {label!r} holds the labels (--label_column): name columns of text")
    texts = tuple(texts or text_columns(train, tables["train"], label))
    is_score = is_regression(labels["train"]) or is_regression([*labels["train"], *labels["validation"]])
    if not is_score and all(map(WHOLE.fullmatch, labels["train"])):
        labels = {split: list(map(without_fraction, column)) for split, column in labels.items()}
    names = [] if is_score else sort_labels(set(labels["train"]))
    if len(names) == 1:
        raise DataError(f"{train}: all examples have the label {names[0]!r}: there is nothing to learn")
    splits: dict[str, dict[str, list]] = {}
    ours = ["label (text)" if name == "label" else name for name in texts]  # "label" holds the numbers of the classes
    for split, rows in tables.items():
        check_columns(files[split], rows, texts)
        splits[split] = {name: texts_of(files[split], rows, theirs) for name, theirs in zip(ours, texts, strict=True)}
        if split != "test":
            splits[split]["label"] = parse_labels(files[split], labels[split], label, names)
    task = Task(None, tuple(ours), tuple(names), "classification" if names else "regression")
    what = f"{len(names):,} classes ({shortened(names)})" if names else "a regression"
    tqdm.write(f"{train}: the text is in {' and '.join(map(repr, texts))}; {label!r} makes {what}")
    return Data(task, splits)


ROW_NUMBERS = re.compile(r"|id|idx|index|unnamed: \d+|__index_level_\d+__", re.IGNORECASE)  # as pandas names them, too
WHOLE = re.compile(r"(-?\d+)(\.0*)?")  # a whole number, also one that is written with a fraction
NUMBER = re.compile(r"[+-]?\d+([.,]\d*)?")
FEW = 20  # whole numbers written with a fraction that are classes


def text_columns(path: str | Path, rows: Sequence[Row], label: str) -> Sequence[str]:
    """Return the columns of text: `sentence1` and `sentence2`, or one or two without labels and numbers."""
    others = [name for name in rows[0] if name != label and not ROW_NUMBERS.fullmatch(name)]
    if len(others) > 1:
        others = [name for name in others if not says_label(rows, name, label)]
    if named := [name for name in ("sentence1", "sentence2") if name in others]:
        return named
    if not others:
        raise DataError(f"{path} has no column of text beside {label!r}")
    if len(others) > 2:
        raise DataError(
            f"{path} has {len(others)} columns beside {label!r} ({shortened(others)}): name the one or two that hold "
            "the text with --text_columns"
        )
    return others


def says_label(rows: Sequence[Row], column: str, label: str) -> bool:
    """Return True if a column says the label again, as `label_text` does beside `label`: one text for each class."""
    pairs = {(str(row.get(column)), str(row.get(label))) for row in rows}
    return len(rows) > len(pairs) == len({text for text, _ in pairs}) == len({name for _, name in pairs})


def texts_of(path: str | Path, rows: Sequence[Row], column: str) -> list[str]:
    """Return a column as text; raise DataError if a field is neither text nor a number."""
    return [text_of(row[column], f"{path}, row {number}, column {column!r}") for number, row in enumerate(rows, 1)]


def labels_of(path: str | Path, rows: Sequence[Row], column: str) -> list[str]:
    """Return the labels as text; raise DataError if a row has none, or one with a decimal comma."""
    check_columns(path, rows, [column])
    labels = [label.strip() for label in texts_of(path, rows, column)]
    are_numbers = all(map(NUMBER.fullmatch, labels))
    for number, label in enumerate(labels, 1):
        where = f"{path}, row {number}: "
        if not label:
            raise DataError(f"{where}no label in column {column!r}: give it one, or take the row out")
        if are_numbers and "," in label:
            raise DataError(f"{where}label {label!r:.80} in column {column!r}: write a decimal point, not a comma")
    return labels


def without_fraction(label: str) -> str:
    """Return "1.0" as "1", and any other label as it is."""
    whole = WHOLE.fullmatch(label)
    return whole[1] if whole else label


def is_regression(labels: Sequence[str]) -> bool:
    """Return True if all labels are numbers, and one has a fraction, or more than 20 are written with one ("3.0")."""
    try:
        numbers = {label: float(label) for label in labels}
    except ValueError:
        return False
    if any(number % 1 for label, number in numbers.items() if not WHOLE.fullmatch(label)):  # NaN and inf, too
        return True
    return len(set(numbers.values())) > FEW and any("." in label for label in numbers)


def sort_labels(names: set[str]) -> list[str]:
    """Sort by number if all names are numbers, else by name."""
    numbers = all(WHOLE.fullmatch(name) and len(name) < MAX_DIGITS for name in names)
    return sorted(names, key=lambda name: (int(name) if numbers else 0, name))


MAX_DIGITS = 1000  # of a number that Python still reads
