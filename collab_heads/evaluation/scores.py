"""Scores that are computed on a thousand resamples of the examples at once, and the paired bootstrap on them.

A score is a function of rows of examples, [R, N] indices, which returns the score of each row, [R].
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Score = Callable[[np.ndarray], np.ndarray]
RESAMPLES = 1000
PERCENTILES = 2.5, 97.5
MOST = 1 << 22  # drawn examples that are held at a time


def on_all(score: Score, count: int) -> float:
    """Return a score on all examples, each once.

    Args:
        score: the score.
        count: the number of examples.
    """
    return float(score(np.arange(count)[None])[0])


def bootstrap_interval(changed: Score, original: Score, count: int, seed: int) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two scores, by a paired bootstrap.

    Each resample draws as many examples as there are, with replacement, and scores both models on them.

    Args:
        changed: the score of one model.
        original: that of the model that it is compared with.
        count: the number of examples.
        seed: seed of the draws.

    Source: Koehn 2004, "Statistical significance tests for machine translation evaluation".
    """
    draws, found, portion = np.random.default_rng(seed), [], max(1, MOST // count)
    for start in range(0, RESAMPLES, portion):
        rows = draws.integers(count, size=(min(portion, RESAMPLES - start), count))
        found.append(changed(rows) - original(rows))
    low, high = np.percentile(np.concatenate(found), PERCENTILES)
    return float(low), float(high)


def mean_of(values: np.ndarray) -> Score:
    """Return the score that is the mean of a number per example, [N]."""
    return lambda rows: values[rows].mean(-1)


def of_sums(statistics: np.ndarray, value: Callable[[np.ndarray], np.ndarray]) -> Score:
    """Return a score that depends on sums over the examples.

    Args:
        statistics: [N, S].
        value: takes the sums of each resample, [R, S], and returns its score, [R].
    """
    statistics = statistics.astype(np.float64)  # exact for counts, and a fast product
    return lambda rows: value(times_drawn(rows) @ statistics)


def times_drawn(rows: np.ndarray) -> np.ndarray:
    """Return how often each example is in each row, [R, N]."""
    count, size = rows.shape
    return np.bincount((rows + size * np.arange(count)[:, None]).ravel(), minlength=rows.size).reshape(rows.shape) * 1.0


def spearman(first: np.ndarray, second: np.ndarray) -> Score:
    """Return Spearman's correlation of two numbers per example, [N] each; 0 where one of them is constant."""
    from scipy.stats import rankdata

    return lambda rows: correlation(*(rankdata(values[rows], axis=-1) for values in (first, second)))


def pearson(first: np.ndarray, second: np.ndarray) -> Score:
    """Return Pearson's correlation of two numbers per example, [N] each; 0 where one of them is constant."""
    return lambda rows: correlation(first[rows], second[rows])


def correlation(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the correlation of the rows of two arrays, [R, N] each; 0 where a row is constant."""
    varies = (np.ptp(each, axis=-1, keepdims=True) > 0 for each in (first, second))
    a, b = ((each - each.mean(-1, keepdims=True)) * some for each, some in zip((first, second), varies, strict=True))
    return ratio((a * b).sum(-1), np.sqrt((a * a).sum(-1) * (b * b).sum(-1)))


def share_reordered(found: np.ndarray, original: np.ndarray) -> float:
    """Return the share of pairs of examples whose order changes, from 0 to 1.

    A pair that is equal in one of the two counts half.

    Args:
        found: a number per example, [N].
        original: the same, [N].
    """
    from scipy.stats import kendalltau

    pairs = len(found) * (len(found) - 1) / 2
    equal, equal_before = pairs_of_equals(found), pairs_of_equals(original)
    if pairs in (equal, equal_before):
        same_less_changed = 0.0  # where one number is constant, or there is no pair, no pair has an order
    else:
        scale = np.sqrt((pairs - equal) * (pairs - equal_before))  # of tau-b
        same_less_changed = float(kendalltau(found, original, method="asymptotic").statistic * scale)
    both = pairs_of_equals(np.stack([found, original], axis=1))
    return (pairs - both - same_less_changed) / (2 * pairs or 1)


def pairs_of_equals(values: np.ndarray) -> float:
    """Return the number of pairs of examples with equal values, of which there are [N] or [N, K]."""
    _, counts = np.unique(values, axis=0, return_counts=True)
    return float((counts * (counts - 1.0)).sum() / 2)


def ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Divide; 0 where the divisor is 0."""
    return np.divide(above, below, out=np.zeros_like(above, dtype=np.float64), where=below > 0)


def class_scores(references: np.ndarray, predictions: np.ndarray, classes: int) -> dict[str, Score]:
    """Return accuracy, F1 and Matthews' correlation of predicted classes.

    F1 is that of class 1 where there are two classes, as in GLUE, and else the mean over the classes that occur.

    Args:
        references: [N], from 0 to classes - 1.
        predictions: [N], the same.
        classes: their number.
    """
    wanted, found = np.eye(classes)[references], np.eye(classes)[predictions]
    statistics = np.concatenate([wanted, found, wanted * found], axis=1)

    def of_counts(value: Callable[..., np.ndarray]) -> Score:
        """Return a score of how often each class is wanted, found, and both, [R, C] each."""
        return of_sums(statistics, lambda sums: value(*np.split(sums, 3, axis=1)))

    return {"accuracy": of_counts(accuracy), "F1": of_counts(f1), "Matthews": of_counts(matthews)}


def accuracy(wanted: np.ndarray, found: np.ndarray, both: np.ndarray) -> np.ndarray:
    return both.sum(1) / wanted.sum(1)


def f1(wanted: np.ndarray, found: np.ndarray, both: np.ndarray) -> np.ndarray:
    each, occurs = ratio(2 * both, wanted + found), wanted + found > 0
    return each[:, 1] if each.shape[1] == 2 else each.sum(1) / occurs.sum(1)


def matthews(wanted: np.ndarray, found: np.ndarray, both: np.ndarray) -> np.ndarray:
    """Return the correlation for any number of classes.

    Source: Gorodkin 2004, "Comparing two K-category assignments by a K-category correlation coefficient".
    """
    total = wanted.sum(1)
    spread = (total**2 - (wanted**2).sum(1)) * (total**2 - (found**2).sum(1))
    return ratio(both.sum(1) * total - (wanted * found).sum(1), np.sqrt(spread))


def of_translations(metric: Any, translations: list[str], references: list[str]) -> Score:
    """Return a score of sacreBLEU.

    Args:
        metric: `sacrebleu.metrics.BLEU` or `CHRF`.
        translations: [N].
        references: [N].
    """
    # what sacrebleu.significance uses itself for its bootstrap
    statistics = np.array(metric._extract_corpus_statistics(translations, [references]))
    value = metric._compute_score_from_stats
    return of_sums(statistics, lambda sums: np.array([value(row).score for row in sums.round().astype(int).tolist()]))


def times(factor: float, score: Score) -> Score:
    """Return a score in another unit."""
    return lambda rows: factor * score(rows)
