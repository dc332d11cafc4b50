"""The GLUE metrics as `evaluate.Metric` modules that need neither the network nor a cache folder.

`evaluate.load("glue", task)` downloads its script from the Hub; `glue_metric(task)` returns the same keys with the same
definitions. Values and references are kept in memory, so that runs at the same time cannot meet in a file.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import datasets
import evaluate
import numpy as np
import torch
from scipy import stats
from sklearn import metrics

from collab_heads.base.checks import check_choice
from collab_heads.errors import ArgumentError, NonFiniteError, ShapeError


def _correlation(correlate: Callable[[np.ndarray, np.ndarray], float]) -> Callable[[np.ndarray, np.ndarray], float]:
    """Wrap a correlation so that it is 0.0, with no warning, where it is undefined: on constants and on one pair."""

    def compute(references: np.ndarray, predictions: np.ndarray) -> float:
        if len(references) < 2:
            return 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # (nearly) constant inputs
            value = float(correlate(references, predictions))
        return value if math.isfinite(value) else 0.0  # NaN would make the run's JSON invalid

    return compute


# name -> function of references and predictions, both [N]
METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": metrics.accuracy_score,
    "f1": lambda references, predictions: metrics.f1_score(references, predictions, zero_division=0.0),
    "matthews_correlation": _correlation(metrics.matthews_corrcoef),
    "pearson": _correlation(lambda references, predictions: stats.pearsonr(references, predictions)[0]),
    "spearmanr": _correlation(lambda references, predictions: stats.spearmanr(references, predictions)[0]),
    "mse": metrics.mean_squared_error,
}


@dataclass(frozen=True)
class Scoring:
    """The metrics of a task and the kind of its references.

    Attributes:
        names: keys of the result, see METRICS.
        primary: the one that is quoted alone and selects a checkpoint; the choice of BERT's Table 1.
        num_labels: number of classes; None if the data decides.
        regression: whether the references are numbers and not classes.
    """

    names: tuple[str, ...] = ("accuracy",)
    primary: str = "accuracy"
    num_labels: int | None = 2
    regression: bool = False


GLUE = {
    "cola": Scoring(("matthews_correlation",), "matthews_correlation"),
    "sst2": Scoring(),
    "mrpc": Scoring(("accuracy", "f1"), "f1"),
    "qqp": Scoring(("accuracy", "f1"), "f1"),
    "stsb": Scoring(("pearson", "spearmanr"), "spearmanr", None, regression=True),
    "mnli": Scoring(num_labels=3),
    "mnli_matched": Scoring(num_labels=3),
    "mnli_mismatched": Scoring(num_labels=3),
    "qnli": Scoring(),
    "rte": Scoring(),
    "wnli": Scoring(),
}
CUSTOM = {
    "classification": Scoring(num_labels=None),
    "regression": Scoring(("pearson", "spearmanr", "mse"), "spearmanr", None, regression=True),
}


def glue_metric(task_name: str) -> evaluate.Metric:
    """Return the metric of a GLUE task, as `evaluate.load("glue", task_name)` defines it."""
    check_choice("GLUE task", task_name, GLUE)
    return GlueMetric(task_name)


def classification_metric() -> evaluate.Metric:
    """Return the metric of a custom classification task: accuracy."""
    return GlueMetric("classification")


def regression_metric() -> evaluate.Metric:
    """Return the metric of a custom regression task: pearson, spearmanr, mse."""
    return GlueMetric("regression")


def primary(task_name: str) -> str:
    """Return the key that is quoted alone and selects a checkpoint; a larger value is better."""
    return _scoring(task_name).primary


def score(task_name: str, values: Mapping[str, float]) -> float:
    """Return GLUE's single number for a task: the mean of its metrics, not times 100.

    An error such as mse is left out of the mean.

    Args:
        task_name: a GLUE task, "classification" or "regression".
        values: what the task's metric computed.
    """
    names = higher_is_better(task_name)
    if missing := [name for name in names if name not in values]:
        raise ArgumentError(f"{task_name} is scored by {', '.join(names)}; {', '.join(missing)} not in {list(values)}")
    return sum(float(values[name]) for name in names) / len(names)


def higher_is_better(task_name: str) -> list[str]:
    """Return the keys of a task's metrics for which a larger value is better."""
    return [name for name in _scoring(task_name).names if name != "mse"]


def _scoring(task_name: str) -> Scoring:
    tasks = GLUE | CUSTOM
    check_choice("task", task_name, tasks)
    return tasks[task_name]


class GlueMetric(evaluate.Metric):
    """The metric of one task; see `glue_metric`, `classification_metric` and `regression_metric`.

    In distributed runs, gather predictions and references first (`accelerator.gather_for_metrics`).
    """

    def __init__(self, task_name: str):
        self.scoring = _scoring(task_name)
        super().__init__(config_name=task_name, keep_in_memory=True)

    def _info(self) -> evaluate.MetricInfo:
        # float64, because rounding to float32 can tie ranks
        dtype = datasets.Value("float64" if self.scoring.regression else "int64")
        return evaluate.MetricInfo(
            description=f"{', '.join(self.scoring.names)} for the task {self.config_name}",
            citation="",
            inputs_description="",
            features=datasets.Features({"predictions": dtype, "references": dtype}),
            format=None,  # "numpy" would round to float32
        )

    def _build_data_dir(self) -> str:
        return ""  # evaluate would make a folder in the user's cache, for nothing

    def add_batch(self, *, predictions=None, references=None):
        """Add predictions and references, [N] each: class indices, or numbers for regression."""
        batch = {
            name: self._checked(name, values)
            for name, values in (("predictions", predictions), ("references", references))
        }
        lengths = {name: len(values) for name, values in batch.items()}
        if len(set(lengths.values())) > 1:
            raise ShapeError(
                f"{lengths['predictions']} predictions do not fit {lengths['references']} references; pass one each"
            )
        super().add_batch(**batch)

    def add(self, *, prediction=None, reference=None):
        """Add one prediction and one reference; raises as `add_batch` does."""
        self.add_batch(predictions=[prediction], references=[reference])

    def compute(self, *, predictions=None, references=None):
        """Return the values of everything added since the last call, as Python floats by name."""
        if self.writer is None and predictions is None and references is None:
            raise ArgumentError(f"{self.config_name}: nothing to score: call add_batch before compute")
        return super().compute(predictions=predictions, references=references)

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        if not predictions:
            raise ArgumentError(f"{self.config_name}: predictions are empty; is the evaluation set empty?")
        pair = np.array(references), np.array(predictions)
        return {name: float(METRICS[name](*pair)) for name in self.scoring.names}

    def _checked(self, name: str, values) -> np.ndarray:
        """Turn a list, an array or a tensor into float64 or int64 [N]."""
        if isinstance(values, torch.Tensor):  # numpy has no bfloat16
            values = (values.double() if values.is_floating_point() else values).numpy(force=True)
        values, what = np.asarray(values), f"{self.config_name}: {name}"
        if values.dtype.kind not in "biuf":
            raise ArgumentError(f"{what} must be numbers, not {values.tolist()!r:.80}")
        if values.ndim != 1:
            raise ShapeError(f"{what} have shape {values.shape}, not (N,); take the argmax, or squeeze, before")
        values = values.astype(np.float64) if values.dtype.kind not in "biu" else values
        if bad := int((~np.isfinite(values)).sum()):
            raise NonFiniteError(f"{what} hold {bad} NaN or inf of {len(values)}; did the training diverge?")
        return values.astype(np.float64) if self.scoring.regression else self._classes(what, values)

    def _classes(self, what: str, values: np.ndarray) -> np.ndarray:
        classes, count = values.astype(np.int64), self.scoring.num_labels
        wrong = values[(classes != values) | (classes < 0) | (classes >= (count or math.inf))]
        if len(wrong):
            known = "0, 1, ..." if count is None else ", ".join(map(str, range(count)))
            hint = "; GLUE's test sets hold -1 for no label" if (wrong == -1).any() else ""
            raise ArgumentError(f"{what} must be classes {known}; {len(wrong)} are not, such as {wrong[0]}{hint}")
        return classes
