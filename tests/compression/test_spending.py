"""The best choices under a budget, against trying all of them."""

import itertools
import math

import numpy as np
import pytest

from collab_heads.compression.spending import UNITS, Option, Spending, worthwhile


def options(seed, sites=4, each=6):
    """Whole costs, so that budgets fall between them."""
    chance = np.random.default_rng(seed)
    return [
        [
            Option(float(cost), float(error))
            for cost, error in zip(chance.integers(1, 60, each), chance.random(each), strict=True)
        ]
        for _ in range(sites)
    ]


def by_trying(all_options, budget):
    """The smallest error of all combinations within a budget."""
    sums = [
        (sum(option.cost for option in chosen), sum(option.error for option in chosen))
        for chosen in itertools.product(*all_options)
    ]
    return min((error for cost, error in sums if cost <= budget), default=math.inf)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_best_for_every_budget(seed):
    tried = options(seed)
    spending = Spending(tried)
    slack = (len(tried) + 1) * (spending.most - spending.least) / UNITS  # by which costs are rounded up
    assert slack < 1  # whole costs: what fits without rounding fits with it, if a budget is half a unit more
    for budget in np.arange(spending.least, spending.most, 7):
        chosen = spending.choose(budget + 0.5)
        spent = sum(each[index].cost for each, index in zip(tried, chosen, strict=True))
        error = sum(each[index].error for each, index in zip(tried, chosen, strict=True))
        assert spent <= budget + 0.5
        assert error == pytest.approx(by_trying(tried, budget), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_cheapest_within_an_error(seed):
    tried = options(seed)
    spending = Spending(tried)
    best = by_trying(tried, math.inf)
    for limit in (best + 0.05, best + 0.3, best + 1.0):
        chosen = spending.within(limit)
        spent = sum(each[index].cost for each, index in zip(tried, chosen, strict=True))
        assert by_trying(tried, spent) <= limit
        assert by_trying(tried, spent - 1.5) > limit


def test_all_there_is_when_the_budget_allows_it():
    tried = options(0)
    best = [min(range(len(each)), key=lambda i: each[i].error) for each in tried]
    spending = Spending(tried)
    assert [each[i].error for each, i in zip(tried, spending.choose(spending.most), strict=True)] == [
        each[i].error for each, i in zip(tried, best, strict=True)
    ]
    assert Spending([[Option(3.0, 0.1)], [Option(2.0, 0.0)]]).choose(5.0) == [0, 0]


def test_what_others_beat_is_left_out():
    assert worthwhile([Option(2, 0.5), Option(1, 0.5), Option(3, 0.6), Option(4, 0.1), Option(4, 0.2)]) == [1, 3]
