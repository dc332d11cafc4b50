"""Choose one option per site so that the errors add up to as little as a budget allows: a multiple-choice knapsack.

Solved exactly, in two steps. Dynamic programming over costs that are rounded down to units bounds from below what the
first sites can add to the error, for every budget at once. A search from the last site to the first then keeps the
partial plans that these bounds do not rule out and no other one beats, with their costs as they are. Few are left: the
bounds are as close as the units are small.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

UNITS = 1 << 14  # into which the range from the cheapest to the dearest options is divided
PARTIAL = 1 << 15  # partial plans that are kept; of more, one for each unit of cost (seen: 2,000 of 64 sites)
AT_ONCE = 1 << 20  # partial plans that are looked at together
CLOSE = 1e-9  # of a unit, and of an error: more than rounding errors


@dataclass(frozen=True)
class Option:
    """One way to have a site.

    Attributes:
        cost: what it costs.
        error: what it adds to the error.
    """

    cost: float
    error: float


@dataclass(frozen=True)
class Partial:
    """Options of some sites; all arrays [plans].

    Attributes:
        costs: above those of the cheapest options.
        errors: of these sites.
        places: the option of the site that was added last.
        before: the number of the plan that it was added to.
    """

    costs: np.ndarray
    errors: np.ndarray
    places: np.ndarray
    before: np.ndarray

    def __getitem__(self, which: np.ndarray) -> "Partial":
        return Partial(self.costs[which], self.errors[which], self.places[which], self.before[which])

    def __len__(self) -> int:
        return len(self.costs)


class Spending:
    """The best choices for every budget.

    Args:
        options: per site, the ways to have it.

    Attributes:
        least, most: the cost of the cheapest options, and of the best ones.
        bounds: [sites + 1, units], what the first sites add to the error at least, by what is spent on them above the
            least.
    """

    def __init__(self, options: Sequence[Sequence[Option]]):
        self.indices = [worthwhile(each) for each in options]
        self.options = [[of_site[i] for i in each] for each, of_site in zip(self.indices, options, strict=True)]
        self.least = math.fsum(each[0].cost for each in self.options)
        self.most = math.fsum(each[-1].cost for each in self.options)
        self.unit = (self.most - self.least) / UNITS or 1.0
        self.rounding = len(options) * np.finfo(float).eps * self.most  # of sums of costs; whole numbers have none
        self.costs = [np.array([option.cost - each[0].cost for option in each]) for each in self.options]
        self.errors = [np.array([option.error for option in each]) for each in self.options]
        self.bounds = np.zeros((len(options) + 1, UNITS + 1))
        for site, (costs, errors) in enumerate(zip(self.costs, self.errors, strict=True)):
            before, after = self.bounds[site], self.bounds[site + 1]
            after.fill(math.inf)
            for units, error in zip(np.floor(costs / self.unit - CLOSE).clip(0).astype(int), errors, strict=True):
                np.minimum(after[units:], before[: UNITS + 1 - units] + error, out=after[units:])

    def choose(self, budget: float) -> list[int]:
        """The option of every site, as its index, that makes the smallest error within a budget of at least `least`."""
        room = budget - self.least + self.rounding
        # What is found with two units less for every site is within the budget: one for the rounding of its cost, one
        # for what may be lost where there are too many partial plans.
        spare = self.units(room) - 2 * len(self.options)
        enough = self.bounds[-1][spare] if spare >= 0 else math.fsum(errors[0] for errors in self.errors)

        def may_win(sites: int, costs: np.ndarray, errors: np.ndarray) -> np.ndarray:
            rest = self.bounds[sites][self.units(room - costs).clip(0)]
            return (costs <= room) & (errors + rest <= enough * (1 + CLOSE))

        plans = reversed(list(self.search(may_win)))
        return self.first(plans, lambda plan: math.fsum(option.cost for option in plan) <= budget)

    def within(self, error: float) -> list[int]:
        """The cheapest options whose errors add up to no more than one; the best ones where none do."""
        limit, bounds = error * (1 + CLOSE), -self.bounds  # rising, as a search in them wants
        enough = (np.searchsorted(bounds[-1], -error * (1 - CLOSE)) + 2 * len(self.options)) * self.unit

        def may_win(sites: int, costs: np.ndarray, errors: np.ndarray) -> np.ndarray:
            rest = np.searchsorted(bounds[sites], errors - limit) * self.unit
            return (errors <= limit) & (costs + rest <= enough)

        return self.first(self.search(may_win), lambda plan: math.fsum(option.error for option in plan) <= error)

    def units(self, cost: np.ndarray | float) -> np.ndarray:
        """How many units a cost holds, no more than there are."""
        return np.floor(np.minimum(cost / self.unit + CLOSE, UNITS)).astype(int)

    def first(self, plans: Iterator[list[int]], fits: Callable[[list[Option]], bool]) -> list[int]:
        """The first plan that fits, as indices of options; without one the best options."""
        best = [len(each) - 1 for each in self.options]
        for places in plans:
            if fits([each[place] for each, place in zip(self.options, places, strict=True)]):
                best = places
                break
        return [each[place] for each, place in zip(self.indices, best, strict=True)]

    def search(self, may_win: Callable[[int, np.ndarray, np.ndarray], np.ndarray]) -> Iterator[list[int]]:
        """All plans that may win and that no other beats in both cost and error, by rising cost: an option per site.

        Args:
            may_win: which partial plans are to be followed, by the number of sites that are still to choose for, their
                costs and their errors.
        """
        none = np.zeros(1, dtype=np.int64)
        steps = [Partial(np.zeros(1), np.zeros(1), none, none)]
        for site in reversed(range(len(self.options))):
            start = steps[-1]
            found: list[Partial] = []
            each = AT_ONCE // (len(start) + 1) + 1
            for first in range(0, len(self.options[site]), each):
                costs = np.add.outer(self.costs[site][first : first + each], start.costs)
                errors = np.add.outer(self.errors[site][first : first + each], start.errors)
                alive = may_win(site, costs, errors)
                places, before = alive.nonzero()
                found = [self.unbeaten([*found, Partial(costs[alive], errors[alive], first + places, before)])]
            steps += found
        for last in range(len(steps[-1])):
            plan, number = [], last
            for step in reversed(steps[1:]):
                plan.append(int(step.places[number]))
                number = int(step.before[number])
            yield plan

    def unbeaten(self, found: Sequence[Partial]) -> Partial:
        """Those of some partial plans that no other beats in both cost and error, by rising cost."""
        plans = Partial(*(np.concatenate([getattr(each, name) for each in found]) for name in Partial.__annotations__))
        plans = plans[np.lexsort((plans.errors, plans.costs))]
        least = np.minimum.accumulate(plans.errors)
        plans = plans[np.r_[True, least[1:] < least[:-1]][: len(plans)]]
        if len(plans) > PARTIAL:  # of each unit the last, which has the least error
            units = np.floor(plans.costs / self.unit)
            plans = plans[np.r_[units[1:] != units[:-1], True]]
        return plans


def worthwhile(options: Sequence[Option]) -> list[int]:
    """The indices of options that no other one beats in both cost and error, by rising cost."""
    kept: list[int] = []
    for index in sorted(range(len(options)), key=lambda i: (options[i].cost, options[i].error)):
        if not kept or options[index].error < options[kept[-1]].error:
            kept.append(index)
    return kept
