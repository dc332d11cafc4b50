"""Colours of maps: one outlier does not make all other heads look alike, and the numbers of the legend are true."""

import pytest
import torch

from collab_heads.analysis.report.scales import CROWDED, STEPS, Scale, linear_stops, scale_of

EVEN = torch.linspace(0.2, 0.9, 72, dtype=torch.float64)


def test_even_numbers_have_a_linear_scale():
    scale = scale_of(EVEN)
    assert scale.name == "linear" and scale.stops[0] == EVEN[0] and scale.stops[-1] == EVEN[-1]
    assert scale.places(EVEN).tolist() == pytest.approx(torch.linspace(0, STEPS, 72).tolist())


def test_sizes_that_differ_by_factors_have_a_logarithm():
    values = torch.logspace(-6, 0, 72, dtype=torch.float64)
    scale = scale_of(values)
    assert scale.name == "logarithm" and scale.stops == pytest.approx(torch.logspace(-6, 0, 9).tolist(), rel=1e-5)
    assert scale.crowded(values) <= CROWDED < Scale("linear", linear_stops(values)).crowded(values)


@pytest.mark.parametrize("outlier", (1e3, 1e9))
def test_one_outlier_does_not_darken_the_others(outlier):
    """Whatever its size: the others keep as many colours, by their ranks."""
    values = torch.cat([EVEN, torch.tensor([outlier], dtype=torch.float64)])
    scale = scale_of(values)
    assert scale.name == "rank" and scale.stops[0] == EVEN[0] and scale.stops[-1] == outlier
    assert scale.stops[4] == pytest.approx(values.median())
    places = scale.places(values)
    assert bool((places.diff() > 0).all()) and float(places[-2]) > STEPS - 1.1
    assert Scale("linear", linear_stops(values)).crowded(values) > 0.98


def test_zero_is_the_middle_of_both_signs():
    for values in (torch.tensor([-1.0, -0.2, 0.1, 0.3, 0.6]), torch.cat([EVEN - 0.5, torch.tensor([50.0])])):
        scale = scale_of(values)
        assert scale.stops[4] == 0 and scale.stops == pytest.approx([-stop for stop in scale.stops[::-1]])
        assert list(scale.stops) == sorted(scale.stops)
    assert scale.name == "rank" and float(scale.places(values)[:-1].max()) > 6


def test_equal_numbers_stay_equal():
    """Nothing is to be told apart where most numbers are the same, such as gates that are open."""
    for values in (torch.ones(12), torch.tensor([1.0] * 11 + [0.0])):
        scale = scale_of(values)
        assert scale.name == "linear" and len({*scale.places(values.double()).tolist()}) == len({*values.tolist()})
