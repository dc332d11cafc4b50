"""The interval of a loss: a paired bootstrap over the examples of the dev set."""

import numpy as np
from scipy.stats import rankdata

ROUNDS = 500


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Return Pearson's correlation, 0 where it is undefined."""
    spread = first.std() * second.std()
    return float(((first - first.mean()) * (second - second.mean())).mean() / spread) if spread else 0.0


METRICS = {
    "accuracy": lambda found, references: float((found == references).mean()),
    "matthews_correlation": correlation,  # of two classes: the same as Pearson's
    "spearmanr": lambda found, references: correlation(rankdata(found), rankdata(references)),
}


def lost_interval(metric: str, before: np.ndarray, after: np.ndarray, references: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of what a metric loses, x 100.

    Args:
        metric: its name.
        before: the predictions of the original, one per example.
        after: those of the changed model.
        references: the labels.
    """
    score, rng, losses = METRICS[metric], np.random.default_rng(0), []
    for _ in range(ROUNDS):
        drawn = rng.integers(len(references), size=len(references))
        losses.append(score(before[drawn], references[drawn]) - score(after[drawn], references[drawn]))
    low, high = np.percentile(losses, (2.5, 97.5))
    return float(100 * low), float(100 * high)
