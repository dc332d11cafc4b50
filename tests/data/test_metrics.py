"""The offline GLUE metrics equal the written definitions, and refuse what has no value."""

import json
import math
import socket
import warnings

import evaluate
import numpy as np
import pytest
import torch

from collab_heads.data.metrics import (
    CUSTOM,
    GLUE,
    GlueMetric,
    classification_metric,
    glue_metric,
    primary,
    regression_metric,
    score,
)
from collab_heads.errors import ArgumentError, NonFiniteError, ShapeError

EXACT64 = 1e-12  # the same formula in another order, in float64

KEYS = {
    "cola": {"matthews_correlation"},
    "mrpc": {"accuracy", "f1"},
    "qqp": {"accuracy", "f1"},
    "stsb": {"pearson", "spearmanr"},
    **{task: {"accuracy"} for task in ("sst2", "mnli", "mnli_matched", "mnli_mismatched", "qnli", "rte", "wnli")},
}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a metric opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def counts(predictions, references):
    """True positives, false positives, false negatives, true negatives of class 1."""
    pairs = list(zip(predictions, references, strict=True))
    return [pairs.count(pair) for pair in ((1, 1), (1, 0), (0, 1), (0, 0))]


def pearson(x, y):
    x, y = x - x.mean(), y - y.mean()
    return (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())


def ranks(values):
    """Mean rank of every value: those below it, and the middle of its ties."""
    return np.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])


def binary(seed=0, size=60):
    """Unbalanced, with different numbers of false positives and false negatives."""
    rng = np.random.default_rng(seed)
    references = (rng.random(size) < 0.7).astype(int)
    predictions = np.where(rng.random(size) < np.where(references == 1, 0.15, 0.4), 1 - references, references)
    return predictions.tolist(), references.tolist()


def numbers(seed=0, size=60):
    """Monotone but not linear, with ties on both sides."""
    rng = np.random.default_rng(seed)
    references = rng.integers(0, 26, size) / 5
    return np.round(np.exp(references) + rng.normal(0, 8, size)), references


def test_every_task_has_glues_keys():
    assert set(GLUE) == set(KEYS)
    for task, keys in KEYS.items():
        metric, last = glue_metric(task), 2 if task.startswith("mnli") else 1
        assert isinstance(metric, evaluate.Metric)
        values = metric.compute(predictions=[last, 0, last], references=[last, 0, 0])
        assert set(values) == keys
        assert all(type(value) is float for value in values.values())
        assert primary(task) in keys
    assert set(classification_metric().compute(predictions=[4, 7], references=[4, 6])) == {"accuracy"}
    assert set(regression_metric().compute(predictions=[4, 7], references=[4, 6])) == {"pearson", "spearmanr", "mse"}


def test_accuracy_and_f1():
    predictions, references = binary()
    tp, fp, fn, tn = counts(predictions, references)
    assert tp > tn and fp and fn and fp != fn  # or else F1 of class 0, precision and recall would pass
    values = glue_metric("mrpc").compute(predictions=predictions, references=references)
    assert values["accuracy"] == pytest.approx((tp + tn) / 60, abs=EXACT64)
    assert values["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn), abs=EXACT64)


def test_matthews_correlation():
    predictions, references = binary()
    tp, fp, fn, tn = counts(predictions, references)
    expected = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    values = glue_metric("cola").compute(predictions=predictions, references=references)
    assert values["matthews_correlation"] == pytest.approx(expected, abs=EXACT64)


def test_correlations_and_error():
    predictions, references = numbers()
    assert len(set(predictions)) < 60 and len(set(references)) < 60
    values = regression_metric().compute(predictions=predictions, references=references)
    assert values["pearson"] == pytest.approx(pearson(predictions, references), abs=EXACT64)
    assert values["spearmanr"] == pytest.approx(pearson(ranks(predictions), ranks(references)), abs=EXACT64)
    assert values["mse"] == pytest.approx(((predictions - references) ** 2).mean(), rel=EXACT64)
    assert values["spearmanr"] - values["pearson"] > 0.05
    del values["mse"]
    assert glue_metric("stsb").compute(predictions=predictions, references=references) == values


def test_close_values_are_not_tied():
    predictions = np.array([1.0, 1.0 + 1e-12, 1.0 + 2e-12])  # equal in float32
    assert glue_metric("stsb").compute(predictions=predictions, references=[1, 2, 3])["spearmanr"] == 1.0


def test_precision_of_the_error():
    mse = regression_metric().compute(predictions=torch.tensor([0.5]), references=[0.5 + 1e-12])["mse"]
    assert mse == pytest.approx(1e-24, rel=1e-3)  # float64 keeps the 1e-12 to 1e-4


@pytest.mark.parametrize(("task", "data"), [("cola", binary()), ("qqp", binary(1)), ("stsb", numbers())])
def test_batches_equal_one_call(task, data):
    predictions, references = data
    metric = glue_metric(task)
    expected = metric.compute(predictions=predictions, references=references)
    for start, stop in ((0, 1), (1, 40), (40, 40), (40, 59)):
        metric.add_batch(predictions=predictions[start:stop], references=references[start:stop])
    metric.add(prediction=predictions[59], reference=references[59])
    assert metric.compute() == expected
    predictions, references = predictions[:9], references[:9]  # and nothing is left of before
    again = metric.compute(predictions=predictions, references=references)
    assert again == glue_metric(task).compute(predictions=predictions, references=references) != expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.bool])
def test_tensors(dtype):
    predictions, references = binary()
    expected = glue_metric("mrpc").compute(predictions=predictions, references=references)
    predictions, references = torch.tensor(predictions).to(dtype), torch.tensor(references).to(dtype)
    assert glue_metric("mrpc").compute(predictions=predictions, references=references) == expected


def test_two_metrics_at_once():
    first, second = glue_metric("sst2"), glue_metric("sst2")
    first.add_batch(predictions=[1], references=[1])
    second.add_batch(predictions=[1], references=[0])
    assert (first.compute(), second.compute()) == ({"accuracy": 1.0}, {"accuracy": 0.0})


def test_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path / "cache")
    glue_metric("stsb").compute(predictions=[1.0, 2.0], references=[1.0, 3.0])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("task", [*GLUE, *CUSTOM])
@pytest.mark.parametrize("predictions", [[1, 1, 1], [0, 0, 0]])
@pytest.mark.parametrize("references", [[1, 1, 1], [0, 1, 0]])
def test_constant_inputs(task, predictions, references):
    values = GlueMetric(task).compute(predictions=predictions, references=references)
    json.dumps(values, allow_nan=False)
    assert 0 <= score(task, values) <= 1
    for name in {"matthews_correlation", "pearson", "spearmanr"} & set(values):
        assert values[name] == 0.0
    assert values.get("f1", 0.0) == 0.0 or any(predictions)


@pytest.mark.parametrize("predictions", [[1.0], [1.0, 1.0 + 1e-15], [-1e308, 1e308], [5e-324, 0.0]])
def test_nearly_constant_and_extreme_predictions(predictions):
    references = list(range(len(predictions)))
    json.dumps(glue_metric("stsb").compute(predictions=predictions, references=references), allow_nan=False)


def test_primary():
    assert [primary(task) for task in ("cola", "mnli", "classification", "mrpc", "qqp", "stsb", "regression")] == (
        ["matthews_correlation", "accuracy", "accuracy", "f1", "f1", "spearmanr", "spearmanr"]
    )


def test_score_is_the_mean():
    assert score("mrpc", {"accuracy": 0.5, "f1": 0.75}) == 0.625
    assert score("stsb", {"pearson": 0.25, "spearmanr": 0.75, "epoch": 9}) == 0.5
    assert score("regression", {"pearson": 0.25, "spearmanr": 0.75, "mse": 9.0}) == 0.5
    assert score("cola", {"matthews_correlation": -0.25}) == -0.25
    with pytest.raises(ArgumentError, match="mrpc is scored by accuracy, f1; f1 not in"):
        score("mrpc", {"accuracy": 0.5})


@pytest.mark.parametrize("function", [glue_metric, primary, lambda task: score(task, {})])
def test_unknown_task(function):
    with pytest.raises(ArgumentError, match=r"'mprc' \(did you mean 'mrpc'\?\); known: .*stsb"):
        function("mprc")
    with pytest.raises(ArgumentError, match="unknown"):
        function(None)
    with pytest.raises(ArgumentError, match="unknown GLUE task 'regression'"):
        glue_metric("regression")


@pytest.mark.parametrize(
    ("task", "predictions", "references", "error", "message"),
    [
        ("stsb", [1.0, math.nan, math.inf], [1, 2, 3], NonFiniteError, "stsb: predictions hold 2 NaN or inf of 3"),
        ("stsb", [1.0, 2.0], [1, math.nan], NonFiniteError, "references hold 1 NaN or inf of 2"),
        ("mrpc", [1.0, math.nan], [1, 0], NonFiniteError, "predictions hold 1 NaN or inf of 2"),
        ("mrpc", torch.tensor([1.0, math.nan]), [1, 0], NonFiniteError, "predictions hold 1 NaN or inf of 2"),
        ("mrpc", [0, 1, 1], [0, 1], ShapeError, "3 predictions do not fit 2 references"),
        ("mrpc", [[0.1, 0.9]], [1], ShapeError, r"predictions have shape \(1, 2\), not \(N,\); take the argmax"),
        ("stsb", torch.ones(2, 1), [1, 2], ShapeError, r"\(2, 1\).*squeeze"),
        ("stsb", 1.0, [1], ShapeError, r"shape \(\)"),
        ("mrpc", None, [1], ArgumentError, "predictions must be numbers, not None"),
        ("mrpc", [1], None, ArgumentError, "references must be numbers, not None"),
        ("mrpc", ["1"], [1], ArgumentError, r"must be numbers, not \['1'\]"),
        ("mrpc", [0.7, 1.0], [1, 1], ArgumentError, "must be classes 0, 1; 1 are not, such as 0.7"),
        ("mrpc", [0, 2], [0, 1], ArgumentError, "predictions must be classes 0, 1; 1 are not, such as 2"),
        ("mnli", [0, 3], [0, 1], ArgumentError, "classes 0, 1, 2; 1 are not, such as 3"),
        ("rte", [0, 1], [-1, -1], ArgumentError, "references must be .*2 are not, such as -1; GLUE's test sets hold"),
        ("classification", [0, -2], [0, 1], ArgumentError, r"classes 0, 1, \.\.\.; 1 are not, such as -2"),
    ],
)
def test_errors(task, predictions, references, error, message):
    metric = GlueMetric(task)
    for call in (metric.add_batch, metric.compute):
        with pytest.raises(error, match=message):
            call(predictions=predictions, references=references)
    values = metric.compute(predictions=[0, 1], references=[0, 1])  # the refused batches left nothing behind
    assert score(task, values) == 1.0


def test_empty():
    metric = glue_metric("mrpc")
    for _ in range(2):
        with pytest.raises(ArgumentError, match="nothing to score"):
            metric.compute()
        with pytest.raises(ArgumentError, match="predictions are empty"):
            metric.compute(predictions=[], references=[])
    assert metric.compute(predictions=[1], references=[1]) == {"accuracy": 1.0, "f1": 1.0}
