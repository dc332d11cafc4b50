"""The best choices under a budget, against trying all of them."""

import itertools
import math

import numpy as np
import pytest

from collab_heads.compression import spending as module
from collab_heads.compression.spending import AnySpending, Option, Spending, worthwhile

UNITS = (1, 16, module.UNITS)  # whatever the units are, what is found is exact


def options(seed, sites=4, each=6, whole=True):
    """Whole costs, of which many plans have the same, or any."""
    chance = np.random.default_rng(seed)
    costs = chance.integers(1, 60, (sites, each)) if whole else 60 * chance.random((sites, each))
    errors = chance.random((sites, each)) + (60 - costs) / 30
    return [
        [Option(float(c), float(e)) for c, e in zip(*both, strict=True)] for both in zip(costs, errors, strict=True)
    ]


def total(tried, indices):
    """Cost and error of a plan."""
    chosen = [each[index] for each, index in zip(tried, indices, strict=True)]
    return math.fsum(option.cost for option in chosen), math.fsum(option.error for option in chosen)


def unbeaten(tried):
    """Cost and error of all plans that no other one beats in both, by rising cost."""
    plans, kept = sorted(total(tried, each) for each in itertools.product(*(range(len(each)) for each in tried))), []
    for plan in plans:
        if not kept or plan[1] < kept[-1][1]:
            kept.append(plan)
    return kept


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("whole", [True, False], ids=["whole costs", "any costs"])
@pytest.mark.parametrize("seed", range(2))
def test_every_plan_that_no_other_beats_is_found(seed, whole, units, monkeypatch):
    monkeypatch.setattr(module, "UNITS", units)
    tried = options(seed, whole=whole)
    spending, plans = Spending(tried), unbeaten(tried)
    assert len(plans) > 10 and (spending.least, spending.most) == (plans[0][0], plans[-1][0])
    for plan, dearer in itertools.pairwise([*plans, (plans[-1][0] + 9, 0)]):
        for budget in (plan[0], (plan[0] + dearer[0]) / 2, math.nextafter(dearer[0], 0)):
            assert total(tried, spending.choose(budget)) == plan
    for worse, plan in itertools.pairwise([(0, plans[0][1] + 1), *plans]):
        for error in (plan[1], (plan[1] + worse[1]) / 2, math.nextafter(worse[1], 0)):
            assert total(tried, spending.within(error)) == plan
    assert total(tried, spending.within(plans[-1][1] / 2)) == plans[-1]  # nothing has as little


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("seed", range(2))
def test_the_best_of_several_solvers(seed, units, monkeypatch):
    """With few units the bounds are far from what solvers find, so the first one by its bound is often not the best."""
    monkeypatch.setattr(module, "UNITS", units)
    tried, some = options(seed), [[0, 1, 2, 5], [0, 3, 4], [0, 2]]
    allowed = [[each] * len(tried) for each in some]
    spending = AnySpending(tried, allowed)
    plans = sorted(total(tried, each) for numbers in some for each in itertools.product(numbers, repeat=len(tried)))
    assert spending.least == plans[0][0]
    for cost, error in plans[::7]:
        spent, found = total(tried, spending.choose(cost))
        assert spent <= cost and found == min(other for less, other in plans if less <= cost)
        spent, found = total(tried, spending.within(error))
        assert found <= error and spent == min(less for less, other in plans if other <= error)
    assert total(tried, spending.within(0.0))[1] == min(error for _, error in plans)  # nothing has as little


@pytest.fixture
def sizes(monkeypatch):
    """(partial plans that were looked at together, those that were kept), site by site."""
    seen, all_unbeaten = [], Spending.unbeaten

    def watched(self, found):
        kept = all_unbeaten(self, found)
        seen.append((sum(map(len, found)), len(kept)))
        return kept

    monkeypatch.setattr(Spending, "unbeaten", watched)
    return seen


@pytest.mark.parametrize("seed", range(3))
def test_where_too_many_plans_may_win_memory_is_bounded_and_a_budget_kept_and_nearly_used(seed, sizes, monkeypatch):
    """Errors that fall as costs rise make all plans as good."""
    for name, small in (("PARTIAL", 64), ("UNITS", 64), ("AT_ONCE", 1)):
        monkeypatch.setattr(module, name, small)
    tried = [[Option(each.cost, 60 - each.cost) for each in of_site] for of_site in options(seed, whole=False)]
    spending, plans = Spending(tried), unbeaten(tried)
    assert len(plans) > 1000
    for cost, error in plans[::50]:
        spent, found = total(tried, spending.choose(cost))
        assert spent <= cost and found <= error + 2 * len(tried) * spending.unit
        spent, found = total(tried, spending.within(error))
        assert found <= error and spent <= cost + 2 * len(tried) * spending.unit
    most = module.UNITS + 1 + 2 * len(tried)
    assert max(kept for _, kept in sizes) <= most and max(seen for seen, _ in sizes) <= 2 * most


def test_of_many_options_of_many_sites_few_plans_are_looked_at(sizes):
    tried = options(0, sites=12, each=300, whole=False)
    spending = Spending(tried)
    budget = (spending.least + spending.most) / 4
    assert budget - spending.unit < total(tried, spending.choose(budget))[0] <= budget
    assert sum(seen for seen, _ in sizes) < 100_000


def test_all_there_is_when_the_budget_allows_it():
    tried = options(0)
    best = [min(range(len(each)), key=lambda i: each[i].error) for each in tried]
    assert Spending(tried).choose(math.inf) == best
    assert Spending([[Option(3.0, 0.1)], [Option(2.0, 0.0)]]).choose(5.0) == [0, 0]


def test_what_others_beat_is_left_out():
    assert worthwhile([Option(2, 0.5), Option(1, 0.5), Option(3, 0.6), Option(4, 0.1), Option(4, 0.2)]) == [1, 3]


def test_of_options_that_are_alike_the_last_is_chosen():
    """It is the site as it is."""
    options = [Option(0.0, 0.0), Option(0.0, 0.5), Option(0.0, 0.0)]
    assert Spending([options, [Option(1.0, 1.0), Option(2.0, 0.0)]]).choose(1.0) == [2, 0]
