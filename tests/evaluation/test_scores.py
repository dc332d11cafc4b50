"""Scores on many resamples at once are those of the metrics' own packages on each; the interval is that of a loop."""

import numpy as np
import pytest
import sacrebleu
from sklearn import metrics

from collab_heads.data.metrics import METRICS
from collab_heads.data.translation import corpus_scores
from collab_heads.evaluation import scores
from collab_heads.evaluation.scores import (
    bootstrap_interval,
    class_scores,
    mean_of,
    of_sums,
    of_translations,
    pearson,
    share_reordered,
    spearman,
)

EXACT64 = 1e-12  # float64, summed in another order
COUNT = 40


@pytest.fixture
def draws():
    return np.random.default_rng(0)


@pytest.fixture
def rows(draws):
    """All examples once, and six resamples."""
    return np.concatenate([np.arange(COUNT)[None], draws.integers(COUNT, size=(6, COUNT))])


@pytest.mark.parametrize("score", (spearman, pearson))
def test_correlations_are_those_of_the_metrics_on_every_resample(score, draws, rows):
    first, second = draws.integers(9, size=(2, COUNT)) / 4.0  # with ties
    metric = METRICS[{spearman: "spearmanr", pearson: "pearson"}[score]]
    expected = [metric(first[row], second[row]) for row in rows]
    assert score(first, second)(rows) == pytest.approx(expected, abs=EXACT64)
    constants = np.repeat(draws.random((50, 1)), COUNT, axis=1)
    rounded = [constant for constant in constants if (constant - constant.mean()).any()]  # these gaps are no spread
    assert rounded and all(score(first, constant)(rows).tolist() == [0.0] * len(rows) for constant in rounded)


def test_pairs_that_change_their_order():
    original = np.array([0.1, 0.2, 0.3, 0.4])
    assert share_reordered(original, original) == 0
    assert share_reordered(original[::-1], original) == 1
    assert share_reordered(np.array([1.0, 0.5, 3, 4]), original) == pytest.approx(1 / 6, abs=EXACT64)
    assert share_reordered(np.ones(4), original) == 0.5
    assert share_reordered(np.array([1.0, 1, 2]), np.array([1.0, 2, 3])) == pytest.approx(1 / 6, abs=EXACT64)
    assert share_reordered(np.ones(4), np.ones(4)) == share_reordered(np.ones(1), np.ones(1)) == 0


def test_pairs_that_change_their_order_are_those_that_a_look_at_each_finds(draws):
    found, original = draws.integers(9, size=(2, COUNT)) / 4.0  # with ties
    pairs = [(i, j) for i in range(COUNT) for j in range(i)]
    changes = [abs(np.sign(found[i] - found[j]) - np.sign(original[i] - original[j])) / 2 for i, j in pairs]
    assert share_reordered(found, original) == pytest.approx(np.mean(changes), abs=EXACT64)


def test_no_examples_have_no_pairs_and_many_are_no_matter(draws):
    assert share_reordered(np.ones(0), np.ones(0)) == 0
    order = draws.permutation(200_000).astype(float)
    found = np.where(order < 2, 1 - order, order)  # one pair changes, of 2e10
    assert share_reordered(found, order) == pytest.approx(2 / (200_000 * 199_999), abs=EXACT64)


@pytest.mark.parametrize("classes", (2, 4))
def test_class_scores_are_those_of_sklearn_on_every_resample(classes, draws, rows):
    references, predictions = draws.integers(classes, size=(2, COUNT))
    predictions[::2] = references[::2]
    f1 = METRICS["f1"] if classes == 2 else lambda *pair: metrics.f1_score(*pair, average="macro")
    wanted = {"accuracy": METRICS["accuracy"], "F1": f1, "Matthews": METRICS["matthews_correlation"]}
    found = class_scores(references, predictions, classes)
    for name, metric in wanted.items():
        expected = [metric(references[row], predictions[row]) for row in rows]
        assert found[name](rows) == pytest.approx(expected, abs=EXACT64), name


def test_class_scores_by_hand():
    """Two of three right; class 1 is found twice, once rightly, and wanted once: F1 2/3, Matthews 1/2."""
    found = class_scores(np.array([1, 0, 0]), np.array([1, 1, 0]), 2)
    on_all = {name: scores.on_all(score, 3) for name, score in found.items()}
    assert on_all == pytest.approx({"accuracy": 2 / 3, "F1": 2 / 3, "Matthews": 0.5}, abs=EXACT64)
    constant = class_scores(np.array([0, 0]), np.array([0, 0]), 3)
    assert {name: scores.on_all(score, 2) for name, score in constant.items()} == {
        "accuracy": 1.0,
        "F1": 1.0,  # of the one class that occurs
        "Matthews": 0.0,
    }


def test_scores_of_translations_are_those_of_sacrebleu_on_every_resample(draws, rows):
    words = np.array("the cat dog sees a man old bird in house".split())
    references = [" ".join(draws.choice(words, 9)) for _ in range(COUNT)]
    own = [" ".join([*text.split()[:-1], "bird"]) for text in references]
    for name, metric in (("bleu", sacrebleu.metrics.BLEU(force=True)), ("chrf", sacrebleu.metrics.CHRF())):
        expected = [corpus_scores([own[i] for i in row], [references[i] for i in row])[0][name] for row in rows]
        assert 10 < expected[0] < 95
        assert of_translations(metric, own, references)(rows) == pytest.approx(expected, abs=1e2 * EXACT64)


def test_means_and_sums_count_every_draw():
    rows = np.array([[0, 1, 2], [2, 2, 0]])
    assert mean_of(np.array([3.0, 0.0, 6.0]))(rows).tolist() == [3.0, 5.0]
    statistics = np.array([[1, 2], [3, 4], [5, 6]])
    assert of_sums(statistics, lambda sums: sums[:, 0] / sums[:, 1])(rows).tolist() == [9 / 12, 11 / 14]


@pytest.mark.parametrize("most", (1 << 22, 35))  # all resamples at once, or five at a time
def test_the_interval_is_that_of_a_loop(most, monkeypatch):
    monkeypatch.setattr(scores, "MOST", most)
    own, original = np.array([1.0, 0, 1, 1, 0, 1, 1]), np.array([0.0, 0, 1, 1, 1, 1, 0])
    draws, differences = np.random.default_rng(3), []
    for _ in range(1000):
        row = draws.integers(7, size=7)
        differences.append(own[row].mean() - original[row].mean())
    expected = np.quantile(differences, 0.025), np.quantile(differences, 0.975)
    found = bootstrap_interval(mean_of(own), mean_of(original), 7, seed=3)
    assert found == pytest.approx(expected, abs=EXACT64)
    assert found[0] < (own - original).mean() < found[1]
    assert bootstrap_interval(mean_of(own), mean_of(own), 7, seed=3) == (0.0, 0.0)  # the same examples for both
