"""Neurons go in the order of exact backward elimination, as heads of width 1 do, and the fit is least squares."""

import itertools

import pytest
import torch

from collab_heads.heads import reconstruction
from collab_heads.heads.reconstruction import HeadRegression, most_costly
from collab_heads.neurons import regression
from collab_heads.neurons.regression import NeuronRegression

ROUNDING = 1e-8  # float64; differences seen: 1e-12


def setup(neurons=40, tokens=300, dim=16, seed=0):
    """A last projection, and neurons of which each has something of the others."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(neurons, neurons, generator=generator, dtype=torch.float64)
    outputs = torch.randn(tokens, neurons, generator=generator, dtype=torch.float64) @ mix
    return torch.randn(dim, neurons, generator=generator, dtype=torch.float64), outputs


def regression_of(kind, weight, outputs):
    scatter = outputs.mT @ outputs / len(outputs)
    return kind(weight, scatter, torch.zeros(len(scatter), dtype=scatter.dtype), len(scatter))


@pytest.mark.parametrize("block", [1, 7, 32, 100])
def test_the_order_is_that_of_heads_of_width_one(block, monkeypatch):
    """Whatever number of removals is collected before the matrices are updated."""
    monkeypatch.setattr(regression, "BLOCK", block)
    weight, outputs = setup()
    ours, theirs = (regression_of(kind, weight, outputs) for kind in (NeuronRegression, HeadRegression))
    costs, expected = ours.removal_costs(), theirs.removal_costs()
    assert costs.argsort().tolist() == expected.argsort().tolist()
    torch.testing.assert_close(costs, expected, rtol=ROUNDING, atol=ROUNDING)


def test_the_first_to_go_is_the_one_that_is_missed_least():
    weight, outputs = setup(neurons=8)
    fit = regression_of(NeuronRegression, weight, outputs)
    lost = [fit.refit([other for other in range(8) if other != gone]).share_lost for gone in range(8)]
    assert int(fit.removal_costs().argmin()) == lost.index(min(lost))
    assert float(fit.removal_costs().min()) == pytest.approx(min(lost), rel=1e-3)  # a ridge of 1e-6


def test_elimination_is_near_the_best_choice():
    """Of all pairs of six, the pair that it leaves is the best one, or loses little more."""
    weight, outputs = setup(neurons=6, seed=3)
    fit = regression_of(NeuronRegression, weight, outputs)
    best = min(fit.refit(pair).share_lost for pair in itertools.combinations(range(6), 2))
    assert best <= fit.refit(most_costly(fit.removal_costs(), 2)).share_lost <= 1.3 * best


def test_neurons_that_others_equal_go_first(monkeypatch):
    """Two copies and a constant of zero cost nothing."""
    monkeypatch.setattr(reconstruction, "RIDGE", 1e-9)
    weight, outputs = setup(neurons=10)
    outputs[:, 7], outputs[:, 3] = outputs[:, 2], 0.0
    fit = regression_of(NeuronRegression, weight, outputs)
    order = fit.removal_costs().argsort().tolist()
    assert set(order[:2]) in ({3, 2}, {3, 7})
    assert fit.refit(sorted(order[2:])).share_lost < 1e-6


def test_nothing_is_left_of_all():
    weight, outputs = setup()
    fit = regression_of(NeuronRegression, weight, outputs)
    assert fit.refit([]).weight.shape == (16, 0) and fit.refit([]).share_lost == pytest.approx(1)
    whole = fit.refit(range(40))
    torch.testing.assert_close(whole.weight, weight, rtol=1e-2, atol=1e-2)  # a ridge of 1e-6
    assert whole.share_lost < 1e-6 and most_costly(fit.removal_costs(), 40) == list(range(40))
