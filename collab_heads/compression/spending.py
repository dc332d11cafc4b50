"""Choose one option per site so that the sum of errors is as small as a budget allows: a multiple-choice knapsack.

It is solved exactly (but see `PARTIAL`), in two steps. Dynamic programming over costs that are rounded down to units
gives lower bounds of what the first sites add to the error, for every budget at once. A search from the last site to
the first, with exact costs, then keeps the partial plans that these bounds do not rule out and that no other plan
beats. Few are left, since small units make close bounds.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

UNITS = 1 << 14  # of cost, between the cheapest and the most expensive options
PARTIAL = 1 << 15  # partial plans that are kept; if there are more, one per unit of cost (seen: 2,000 for 64 sites)
AT_ONCE = 1 << 20  # partial plans that are examined together
CLOSE = 1e-9  # tolerance, relative to a unit and to an error: more than rounding errors


@dataclass(frozen=True)
class Option:
    """One option of a site.

    Attributes:
        cost: its cost.
        error: what it adds to the error.
    """

    cost: float
    error: float


@dataclass(frozen=True)
class Partial:
    """The partial plans for some sites, one option each; all arrays are [plans].

    Attributes:
        costs: cost of these sites above that of their cheapest options.
        errors: sum of the errors of these sites.
        places: index of the option of the site that was added last.
        before: index of the plan that this site was added to.
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
    """The solver: it finds the best options for any budget.

    Args:
        options: the options of every site.

    Attributes:
        least, most: the cost of the cheapest options, and of the best ones.
        bounds: [sites + 1, units + 1], lower bounds of what the first sites add to the error, by the units spent on
            them above the least.
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
        """Return the options, as an index per site, that have the least error within a budget of at least `least`."""
        room = budget - self.least + self.rounding
        # A plan for two units per site less stays within the budget: one unit covers the rounding of the site's cost,
        # the other what is lost if there are too many partial plans.
        spare = self.units(room) - 2 * len(self.options)
        enough = self.bounds[-1][spare] if spare >= 0 else math.fsum(errors[0] for errors in self.errors)

        def may_win(sites: int, costs: np.ndarray, errors: np.ndarray) -> np.ndarray:
            rest = self.bounds[sites][self.units(room - costs).clip(0)]
            return (costs <= room) & (errors + rest <= enough * (1 + CLOSE))

        plans = reversed(list(self.search(may_win)))
        return self.first(plans, lambda plan: math.fsum(option.cost for option in plan) <= budget)

    def within(self, error: float) -> list[int]:
        """Return the cheapest options, as indices, whose errors add up to at most `error`; the best ones if none do."""
        limit, bounds = error * (1 + CLOSE), -self.bounds  # rising, as a search in them wants
        enough = (np.searchsorted(bounds[-1], -error * (1 - CLOSE)) + 2 * len(self.options)) * self.unit

        def may_win(sites: int, costs: np.ndarray, errors: np.ndarray) -> np.ndarray:
            rest = np.searchsorted(bounds[sites], errors - limit) * self.unit
            return (errors <= limit) & (costs + rest <= enough)

        return self.first(self.search(may_win), lambda plan: math.fsum(option.error for option in plan) <= error)

    def bound(self, budget: float) -> float:
        """Return a lower bound of the error within a budget of at least `least`."""
        return float(self.bounds[-1][self.units(budget - self.least + self.rounding)])

    def units(self, cost: np.ndarray | float) -> np.ndarray:
        """Convert costs to whole units, at most `UNITS`."""
        return np.floor(np.minimum(cost / self.unit + CLOSE, UNITS)).astype(int)

    def first(self, plans: Iterator[list[int]], fits: Callable[[list[Option]], bool]) -> list[int]:
        """Return the first plan that fits, as indices of the given options; without one the best options."""
        best = [len(each) - 1 for each in self.options]
        for places in plans:
            if fits([each[place] for each, place in zip(self.options, places, strict=True)]):
                best = places
                break
        return [each[place] for each, place in zip(self.indices, best, strict=True)]

    def search(self, may_win: Callable[[int, np.ndarray, np.ndarray], np.ndarray]) -> Iterator[list[int]]:
        """Yield the plans, an option per site, that may win and that no other beats in cost and error, by rising cost.

        Args:
            may_win: marks the partial plans to continue, given the number of sites still to choose for, and the costs
                and errors of the partial plans.
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
        """Return the partial plans that no other beats in both cost and error, by rising cost.

        If there are more than `PARTIAL`, only one is kept per unit of cost.
        """
        plans = Partial(*(np.concatenate([getattr(each, name) for each in found]) for name in Partial.__annotations__))
        plans = plans[np.lexsort((plans.errors, plans.costs))]
        least = np.minimum.accumulate(plans.errors)
        plans = plans[np.r_[True, least[1:] < least[:-1]][: len(plans)]]
        if len(plans) > PARTIAL:  # of each unit the last, which has the least error
            units = np.floor(plans.costs / self.unit)
            plans = plans[np.r_[units[1:] != units[:-1], True]]
        return plans


class AnySpending:
    """Several solvers, of which each may use some of the options; the best of their choices counts.

    Args:
        options: the options of every site.
        allowed: for each solver the indices of the options that it may use: [solvers][sites][some].

    Attributes:
        least: the cost of the cheapest options.
    """

    def __init__(self, options: Sequence[Sequence[Option]], allowed: Iterable[Sequence[Sequence[int]]]):
        self.options, self.allowed = options, list(allowed)
        self.solvers = [
            Spending([[of_site[i] for i in some] for of_site, some in zip(options, each, strict=True)])
            for each in self.allowed
        ]
        self.least = min(solver.least for solver in self.solvers)

    def choose(self, budget: float) -> list[int]:
        """Return the options, as an index per site, that have the least error within a budget of at least `least`."""
        best, least = None, math.inf
        able = [number for number, solver in enumerate(self.solvers) if solver.least <= budget]
        for bound, number in sorted((self.solvers[number].bound(budget), number) for number in able):
            if bound > least * (1 + CLOSE):
                break
            found = self.named(number, self.solvers[number].choose(budget))
            if (error := self.total(found, "error")) < least:
                best, least = found, error
        assert best is not None
        return best

    def within(self, error: float) -> list[int]:
        """Return the cheapest options, as indices, whose errors add up to at most `error`; the best ones if none do."""
        found = [self.named(number, solver.within(error)) for number, solver in enumerate(self.solvers)]
        fitting = [each for each in found if self.total(each, "error") <= error]
        if fitting:
            return min(fitting, key=lambda each: self.total(each, "cost"))
        return min(found, key=lambda each: self.total(each, "error"))

    def named(self, number: int, places: Sequence[int]) -> list[int]:
        """Turn the places of options in a solver into their indices."""
        return [some[place] for some, place in zip(self.allowed[number], places, strict=True)]

    def total(self, chosen: Sequence[int], name: Literal["cost", "error"]) -> float:
        """Return the sum of the costs, or errors, of options."""
        return math.fsum(getattr(options[i], name) for options, i in zip(self.options, chosen, strict=True))


def worthwhile(options: Sequence[Option]) -> list[int]:
    """Return the indices of the options that no other one beats in both cost and error, by rising cost.

    Of options that are alike the last one is returned: that of a site as it is, where nothing is gained.
    """
    kept: list[int] = []
    for index in sorted(range(len(options)), key=lambda i: (options[i].cost, options[i].error, -i)):
        if not kept or options[index].error < options[kept[-1]].error:
            kept.append(index)
    return kept
