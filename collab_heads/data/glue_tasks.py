"""The GLUE tasks: their texts, labels and metrics, and the layout of their files.

Source: Wang et al. 2019, arXiv:1804.07461.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Task:
    """One classification or regression task.

    Attributes:
        name: as on the Hub; None for the user's own files.
        texts: the columns of the one or two texts.
        labels: the names of the classes, in the order of their numbers; empty for regression.
        metric: the name of the GLUE task whose metric applies, or "classification" or "regression".
        epochs: number of epochs for `--num_train_epochs auto`.
    """

    name: str | None
    texts: tuple[str, ...]
    labels: tuple[str, ...]
    metric: str
    epochs: int = 3

    @property
    def num_labels(self) -> int:
        """The number of outputs of the model: 1 for regression."""
        return len(self.labels) or 1


@dataclass(frozen=True)
class Layout:
    """The layout of a task's files in a GLUE folder, and the format of its submissions.

    Attributes:
        folder: name of the task's folder.
        texts: columns of the texts in the files.
        label: column of the label.
        header: the columns of train and dev files without a header line.
        suffixes: of the validation and test splits, in names of splits and files -> in names of submissions.
        by_name: whether files and submissions spell labels out instead of numbering them.
        diagnostic: whether GLUE wants predictions for its diagnostic set (AX) from this task's model, too.
    """

    folder: str
    texts: tuple[str, ...]
    label: str = "label"
    header: tuple[str, ...] | None = None
    suffixes: Mapping[str, str] = field(default_factory=lambda: {"": ""})
    by_name: bool = False
    diagnostic: bool = False

    def splits(self, test: bool) -> dict[str, str]:
        """Return split -> file: train, validation and, where asked for, test."""
        files = {"train": "train.tsv"} | {f"validation{suffix}": f"dev{suffix}.tsv" for suffix in self.suffixes}
        return files | ({f"test{suffix}": f"test{suffix}.tsv" for suffix in self.suffixes} if test else {})

    def submission(self, split: str) -> str:
        """Return the file name that GLUE wants for a test split, such as "MNLI-mm.tsv" for "test_mismatched"."""
        return "AX.tsv" if split == AX else f"{self.folder}{self.suffixes[split.removeprefix('test')]}.tsv"


AX, DIAGNOSTIC = "test_ax", "../diagnostic/diagnostic.tsv"  # GLUE's diagnostic set: its split, beside the task's folder
LONG = 10  # epochs of RTE and of SST-2 (which is not small) in epfml/collaborative-attention; the other tasks have 3
ENTAILMENT = ("entailment", "not_entailment")
TASKS = {
    str(task.name): task
    for task in (
        Task("cola", ("sentence",), ("unacceptable", "acceptable"), "cola"),
        Task("sst2", ("sentence",), ("negative", "positive"), "sst2", LONG),
        Task("mrpc", ("sentence1", "sentence2"), ("not_equivalent", "equivalent"), "mrpc"),
        Task("stsb", ("sentence1", "sentence2"), (), "stsb"),
        Task("qqp", ("question1", "question2"), ("not_duplicate", "duplicate"), "qqp"),
        Task("mnli", ("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), "mnli"),
        Task("qnli", ("question", "sentence"), ENTAILMENT, "qnli"),
        Task("rte", ("sentence1", "sentence2"), ENTAILMENT, "rte", LONG),
        Task("wnli", ("sentence1", "sentence2"), ("not_entailment", "entailment"), "wnli"),
    )
}
LAYOUTS = {
    "cola": Layout("CoLA", ("sentence",), header=("source", "label", "mark", "sentence")),
    "sst2": Layout("SST-2", ("sentence",)),
    "mrpc": Layout("MRPC", ("#1 String", "#2 String"), label="Quality"),
    "stsb": Layout("STS-B", ("sentence1", "sentence2"), label="score"),
    "qqp": Layout("QQP", ("question1", "question2"), label="is_duplicate"),
    "mnli": Layout(
        "MNLI",
        ("sentence1", "sentence2"),
        label="gold_label",
        suffixes={"_matched": "-m", "_mismatched": "-mm"},
        by_name=True,
        diagnostic=True,
    ),
    "qnli": Layout("QNLI", ("question", "sentence"), by_name=True),
    "rte": Layout("RTE", ("sentence1", "sentence2"), by_name=True),
    "wnli": Layout("WNLI", ("sentence1", "sentence2")),
}
