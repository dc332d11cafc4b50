"""Neurons go in the order of exact backward elimination, as heads of width 1 do, and the fit is least squares."""

import itertools

import pytest
import torch
from compressing import first_block

from collab_heads.calibration.input_moments import InputMoments
from collab_heads.fitting import head_regression, neuron_regression
from collab_heads.fitting.head_regression import HeadRegression, by_cost, most_costly
from collab_heads.fitting.neuron_regression import NeuronRegression, refit_errors
from collab_heads.layers.layout import weight_of
from families import FAMILIES

ROUNDING = 1e-8  # float64; differences seen: 1e-12
LONG_ROUNDING = 1e-7  # the same after hundreds of removals; differences seen: 3e-11


def setup(neurons=40, tokens=300, dim=16, seed=0):
    """A last projection, and neurons of which each has something of the others."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(neurons, neurons, generator=generator, dtype=torch.float64)
    outputs = torch.randn(tokens, neurons, generator=generator, dtype=torch.float64) @ mix
    return torch.randn(dim, neurons, generator=generator, dtype=torch.float64), outputs


def regression_of(kind, weight, outputs):
    scatter = outputs.mT @ outputs / len(outputs)
    return kind(weight, scatter, torch.zeros(len(scatter), dtype=scatter.dtype), len(scatter))


@pytest.mark.parametrize("block, least", [(1, 1), (7, 1), (7, 16), (32, 3), (100, 1)])
def test_the_order_is_that_of_heads_of_width_one(block, least, monkeypatch):
    """Whatever number of removals is collected before the matrices are updated, and of rows computed together."""
    monkeypatch.setattr(neuron_regression, "BLOCK", block)
    monkeypatch.setattr(neuron_regression, "LEAST", least)
    weight, outputs = setup()
    ours, theirs = (regression_of(kind, weight, outputs) for kind in (NeuronRegression, HeadRegression))
    costs, expected = ours.removal_costs(), theirs.removal_costs()
    assert costs.argsort().tolist() == expected.argsort().tolist()
    torch.testing.assert_close(costs, expected, rtol=ROUNDING, atol=ROUNDING)


def test_costs_are_those_of_least_squares_after_hundreds_of_removals():
    """Rounding does not grow while the matrices are updated."""
    neurons = 512
    weight, outputs = setup(neurons, tokens=700)
    fit = regression_of(NeuronRegression, weight, outputs)
    costs, before = fit.removal_costs(), fit.weight.clone()
    order = by_cost(costs)
    ridge = fit.ridge.sqrt().diag()
    inputs = torch.cat([outputs / len(outputs) ** 0.5, ridge])  # the ridge as further tokens
    targets = inputs @ weight.mT
    for count in (1, 2, 20, 100, 200, 300, 400, 450, 500, 510):
        kept = inputs[:, order[:count]]
        missing = targets - kept @ torch.linalg.lstsq(kept, targets).solution
        lost = min(float(missing.square().sum()) / fit.whole, 1.0)
        assert float(costs[order[count]]) == pytest.approx(lost, rel=LONG_ROUNDING)
    assert torch.equal(fit.weight, before)


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
    monkeypatch.setattr(head_regression, "RIDGE", 1e-9)
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


def test_neurons_that_cost_the_same_stay_in_their_order():
    """Everywhere: `topk` leaves open which of them it takes."""
    costs = torch.tensor([0.5, 1.0, 0.5, 0.5, 1.0, 0.5] * 20, dtype=torch.float64)
    assert by_cost(costs).tolist() == sorted(range(120), key=lambda index: (-float(costs[index]), index))
    assert most_costly(costs, 43) == sorted([*(i for i in range(120) if i % 3 == 1), 0, 2, 3])


@pytest.mark.parametrize("constant", (1.0, 3e4))
def test_neurons_that_are_constant_lose_nothing(constant):
    outputs = torch.full((700, 24), constant, dtype=torch.float64) * torch.linspace(0.1, 1, 24).double()
    moments = moments_of(outputs)
    fit = NeuronRegression.of(setup(24)[0], moments, 24, has_bias=True, doubt=neuron_regression.DOUBT)
    costs = fit.removal_costs()
    assert costs.isfinite().all()
    assert refit_errors(fit, by_cost(costs), (0, 1, 12), moments) == {0: 0.0, 1: 0.0, 12: 0.0}


def moments_of(outputs):
    return InputMoments.of(outputs[None], centres=False)


@pytest.mark.parametrize("has_bias", (True, False))
def test_errors_of_refits_are_those_of_each_of_them(has_bias):
    """One factor serves all counts, in any order, on other examples than those that were fitted to."""
    weight, outputs = setup()
    outputs, held = outputs + 0.5, setup(seed=1)[1] - 0.3
    moments = moments_of(outputs)
    fit = NeuronRegression.of(weight, moments, 40, has_bias=has_bias, doubt=neuron_regression.DOUBT)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    counts = (0, 1, 8, 24, 40)
    scatter = fit.scatter.clone()
    errors = refit_errors(fit, order, counts, moments_of(held))
    assert list(errors) == list(counts) and torch.equal(fit.scatter, scatter)
    whole = (held - held.mean(0)) @ weight.mT
    for count, error in errors.items():
        kept = order[:count].tolist()
        output = fit.output(kept)
        moved = held[:, kept] @ output.weight.mT - held @ weight.mT + (output.bias if has_bias else 0)
        real = float(moved.square().sum() / whole.square().sum())
        assert error == pytest.approx(min(real, 1.0), rel=ROUNDING, abs=ROUNDING)
    assert errors[40] < errors[24] < errors[8]


def test_a_projection_is_solved_as_with_the_inverse():
    weight, outputs = setup()
    fit, kept = regression_of(NeuronRegression, weight, outputs), list(range(3, 30))
    inverse = torch.linalg.inv(fit.ridged(torch.tensor(kept)))
    torch.testing.assert_close(
        fit.output(kept).weight, fit.right(torch.tensor(kept)) @ inverse, rtol=ROUNDING, atol=ROUNDING
    )


@pytest.mark.parametrize("name, has_bias", [("bert", True), ("t5", False)])
def test_a_block_is_regressed_around_its_mean_only_if_a_bias_can_make_up_for_it(name, has_bias, monkeypatch):
    """Outputs of neurons are far from centred; the expected values are a least squares fit by torch."""
    monkeypatch.setattr(neuron_regression, "DOUBT", 0.0)
    monkeypatch.setattr(head_regression, "RIDGE", 1e-12)
    block, generator = first_block(FAMILIES[name].build()), torch.Generator().manual_seed(0)
    rows = 2 + torch.randn(500, block.num_neurons, generator=generator, dtype=torch.float64)
    moments = InputMoments.of(rows[None])
    kept, weight = [*range(0, block.num_neurons, 2)], weight_of(block.output).detach().double()
    found = NeuronRegression.of_block(block, moments).output(kept)
    inputs = torch.cat([rows[:, kept], rows.new_ones(len(rows), has_bias)], dim=1)
    expected = torch.linalg.lstsq(inputs, rows @ weight.mT).solution.mT
    torch.testing.assert_close(found.weight, expected[:, : len(kept)], rtol=0, atol=1e-8)
    bias = expected[:, -1] if has_bias else torch.zeros(len(weight), dtype=weight.dtype)
    torch.testing.assert_close(found.bias, bias, rtol=0, atol=1e-8)


def test_many_neurons_that_are_equally_easy_to_remove():
    """The projection reads none of them."""
    weight, outputs = setup(neurons=400, tokens=700)
    weight[:, ::2] = 0
    costs = regression_of(NeuronRegression, weight, outputs).removal_costs()
    assert costs[::2].max() < ROUNDING < costs[1::2].min()
