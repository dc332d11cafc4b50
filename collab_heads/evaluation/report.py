"""The result of `evaluate`: a table with a row per model."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from collab_heads.base.report import Report


@dataclass(frozen=True)
class ScoreChange:
    """How far a score is from the original's.

    Attributes:
        difference: the score less the original's.
        low: the lower end of the 95 % interval of the difference.
        high: its upper end.
    """

    difference: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.difference:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


@dataclass(frozen=True)
class EvaluatedModel:
    """A model in an `EvaluationReport`.

    Attributes:
        name: its name.
        scores: its scores by name; shares are x 100.
        changes: how far each is from the original's; empty for the original.
        flips: the share of its answers that differ from the original's, from 0 to 1; None for the original.
        megabytes: the size of its weights, in 10^6 bytes: of the files in a folder, or of the tensors of a model.
        seconds: the time of the first examples, with one thread, the median of several runs.
        time: the same as a share of the original's, which ran in turns with the model.
    """

    name: str
    scores: Mapping[str, float]
    changes: Mapping[str, ScoreChange]
    flips: float | None
    megabytes: float
    seconds: float
    time: float


@dataclass(frozen=True)
class EvaluationReport(Report):
    """The result of `evaluate`.

    Attributes:
        task: the name of the task, or of the function.
        examples: the number of examples: pairs, texts, or queries.
        timed: the number of examples that were timed.
        flips_of: what flips are a share of.
        models: the original and the others, in their order.
    """

    task: str
    examples: int
    timed: int
    flips_of: str
    models: tuple[EvaluatedModel, ...]

    ENTRIES = "models"

    def columns(self):
        first = self.models[0]
        return {
            "model": "{0.name}",
            **{name: partial(score_cell, name) for name in first.scores},
            "flips": lambda each: "" if each.flips is None else f"{each.flips:.1%}",
            "MB": "{0.megabytes:,.1f}",
            "ms": lambda each: f"{1000 * each.seconds:,.1f}",
            "time": "{0.time:.2f}",
        }

    def closing(self):
        return f"{self.task}, {self.examples:,} examples; flips: {self.flips_of}"

    def remarks(self):
        return [
            "in brackets: 95 % interval of the difference from the original (paired bootstrap)",
            f"time: {self.timed:,} examples, one thread, median of several runs; ms, and as a share of the original's, "
            "in turns with it",
        ]


def score_cell(name: str, model: EvaluatedModel) -> str:
    """Return the cell of a score: the score and, for a changed model, its difference from the original's."""
    return " ".join([f"{model.scores[name]:.2f}", *(str(each) for each in [model.changes.get(name)] if each)])
