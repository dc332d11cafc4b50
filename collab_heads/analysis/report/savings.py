"""What of a model can go, and how: from what the report has measured, and nothing else."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol

from collab_heads.analysis.report.measurements import HeadMeasurements
from collab_heads.analysis.report.page_data import Head, heads_of

# What can tell what a head costs by itself, and across layers, the best first; and what it says of a head. Relevance
# as a share of a layer cannot.
COSTS = {
    "leave_one_out": "how much worse the {metric} is without them",
    "gradient": "gradient importance",
    "absolute_relevance": "absolute relevance",
}
CHEAPEST = 0.1  # of the heads are named
MOST = 12  # at most so many
PAIRS = 5  # pairs of heads that are named
ALIKE = 0.7  # the cosine of heads that put out nearly the same: the angle between them is below 45 degrees
BUDGETS = (0.9, 0.75, 0.5, 0.33, 0.25, 0.1)


class Plan(Protocol):
    """What `collab_heads.compression.plan` returns, as far as a report needs it."""

    def to_dict(self) -> dict[str, Any]:
        """of: what budgets are of; curve: (budget, predicted error of the output)."""


@dataclass(frozen=True)
class Cheap:
    """The heads that cost least.

    Attributes:
        measure: by which.
        said: what the numbers are.
        heads: and their numbers, the cheapest first.
    """

    measure: str
    said: str
    heads: Sequence[tuple[Head, float]]

    def by_path(self) -> dict[str, list[int]]:
        """The heads as `prune_heads` takes them."""
        chosen: dict[str, list[int]] = {}
        for head, _ in self.heads:
            chosen.setdefault(head.site.path, []).append(head.number)
        return {path: sorted(numbers) for path, numbers in chosen.items()}


def cheapest(report: HeadMeasurements) -> Cheap | None:
    """The heads whose removal costs least, by the best measure that there is; None without one.

    No site loses all its heads.
    """
    scores = report.scores()
    measure = next((name for name in COSTS if name in scores), None)
    if measure is None:
        return None
    ranked = sorted(
        ((head, float(scores[measure][head.site.path][head.index])) for head in heads_of(report)), key=lambda e: e[1]
    )
    left = {site.path: site.num_heads for site in report.sites}
    chosen: list[tuple[Head, float]] = []
    for head, cost in ranked:
        if len(chosen) < min(MOST, math.ceil(CHEAPEST * len(ranked))) and left[head.site.path] > 1:
            left[head.site.path] -= 1
            chosen.append((head, cost))
    metric = "" if report.ablation is None else report.ablation.metric
    return Cheap(measure, COSTS[measure].format(metric=metric), chosen)


def most_alike(report: HeadMeasurements) -> list[tuple[Head, Head, float]]:
    """The pairs of heads of a layer with the most similar outputs, and their cosines."""
    cosines = {} if report.statistics is None else report.statistics.cosine
    pairs = [
        (one, other, float(cosines[one.site.path][one.index, other.index]))
        for one, other in combinations(heads_of(report), 2)
        if one.site == other.site and one.site.path in cosines
    ]
    return sorted(pairs, key=lambda pair: -pair[2])[:PAIRS]


def kept_heads(report: HeadMeasurements) -> tuple[str, list[tuple[int, float]]] | None:
    """The measured price of fewer heads: the measure with the best curve, and (heads kept, metric); None without one.

    The best is the one whose metric is best on average.
    """
    if report.ablation is None or not report.curves:
        return None
    sign = -1.0 if report.ablation.higher_is_better else 1.0

    def mean(points: Sequence[tuple[int, float]]) -> float:
        return sign * sum(value for _, value in points) / len(points)

    name = min(report.curves, key=lambda each: mean(report.curves[each]))
    return name, sorted(report.curves[name], reverse=True)


def predicted(plan: Plan) -> tuple[str, list[tuple[float, float]]]:
    """What a plan's budgets are of, and (budget, predicted error) of some."""
    described: Mapping[str, Any] = plan.to_dict()
    curve = described["curve"]
    nearest = {budget: min(curve, key=lambda point: abs(point[0] - budget)) for budget in BUDGETS}
    # a curve of 64 points has one nearby, unless the budget is below the least that there is
    near = (1 - curve[0][0]) / max(1, len(curve) - 1)
    return described["of"], [point for budget, point in nearest.items() if abs(point[0] - budget) <= near]
