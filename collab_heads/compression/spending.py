"""Choose one option per site so that the errors add up to as little as a budget allows: a multiple-choice knapsack.

Solved by dynamic programming over costs in small units, which finds the best for every budget at once. Costs are
rounded up to units, so a budget is never exceeded, and what is found is the best but for that rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

UNITS = 1 << 14  # into which the range from the cheapest to the dearest options is divided


@dataclass(frozen=True)
class Option:
    """One way to have a site.

    Attributes:
        cost: what it costs.
        error: what it adds to the error.
    """

    cost: float
    error: float


class Spending:
    """The best choices for every budget.

    Args:
        options: per site, the ways to have it.

    Attributes:
        least, most: the cost of the cheapest options, and of the best ones.
        errors: [units], the smallest error by what is spent above the least.
    """

    def __init__(self, options: Sequence[Sequence[Option]]):
        self.options = [worthwhile(each) for each in options]
        self.least = sum(options[each[0]].cost for each, options in zip(self.options, options, strict=True))
        self.most = sum(options[each[-1]].cost for each, options in zip(self.options, options, strict=True))
        self.unit = (self.most - self.least) / UNITS or 1.0
        size = UNITS + len(options) + 1  # each site may lose a unit by rounding
        self.errors, self.chosen = np.zeros(size), np.zeros((len(options), size), dtype=np.int64)
        for site, (each, all_of_site) in enumerate(zip(self.options, options, strict=True)):
            best = np.full(size, math.inf)
            for place, index in enumerate(each):
                units = self.units(all_of_site[index].cost - all_of_site[each[0]].cost)
                reached = np.full(size, math.inf)
                reached[units:] = self.errors[: size - units] + all_of_site[index].error
                better = reached < best
                best[better], self.chosen[site, better] = reached[better], place
            self.errors = best
        self.costs = [[all_of[i].cost for i in each] for each, all_of in zip(self.options, options, strict=True)]

    def units(self, cost: float) -> int:
        """A cost in units, rounded up, but for rounding errors."""
        return math.ceil(cost / self.unit - 1e-9)

    def choose(self, budget: float) -> list[int]:
        """The option of every site, as its index, that makes the smallest error within a budget of at least `least`."""
        if budget >= self.most:
            return [each[-1] for each in self.options]
        return self.traced(int((budget - self.least) / self.unit + 1e-9))

    def within(self, error: float) -> list[int]:
        """The cheapest options whose errors add up to no more than one."""
        return self.traced(
            int(np.argmax(self.errors <= error)) if (self.errors <= error).any() else len(self.errors) - 1
        )

    def traced(self, left: int) -> list[int]:
        """The options behind an entry of `errors`."""
        indices = []
        for site in reversed(range(len(self.options))):
            place = int(self.chosen[site, left])
            indices.append(self.options[site][place])
            left -= self.units(self.costs[site][place] - self.costs[site][0])
        return indices[::-1]


def worthwhile(options: Sequence[Option]) -> list[int]:
    """The indices of options that no other one beats in both cost and error, by rising cost."""
    kept: list[int] = []
    for index in sorted(range(len(options)), key=lambda i: (options[i].cost, options[i].error)):
        if not kept or options[index].error < options[kept[-1]].error:
            kept.append(index)
    return kept
