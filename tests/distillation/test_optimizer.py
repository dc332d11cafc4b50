"""Steps add up in half precision, and their size follows a plan."""

import pytest
import torch
from torch import nn

from collab_heads.distillation.optimizer import MasterWeights
from collab_heads.distillation.processes import Processes

ALONE = Processes(1, 0, torch.device("cpu"), "no")


def test_steps_that_bfloat16_loses_add_up():
    """At 1 the next smaller number of bfloat16 is 0.0039 away: no step of 0.001 shows alone."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    weights = MasterWeights({"w": weight}, learning_rate=1e-3, steps=40)
    seen = []
    for step in range(40):
        weight.grad = torch.ones_like(weight)
        weights.take_step(step, ALONE)
        assert weight.grad is None
        seen.append(weight[0].item())
    assert seen[1] == 1.0 and weight.dtype == torch.bfloat16
    assert seen[-1] == pytest.approx(1 - sum(map(weights.rate, range(40))), abs=2**-8)  # of bfloat16
    assert seen[-1] < 0.99


def test_the_rate_rises_shortly_and_falls_to_nothing():
    weights = MasterWeights({"w": nn.Parameter(torch.ones(1))}, learning_rate=2.0, steps=100)
    rates = [weights.rate(step) for step in range(100)]
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert rates[5:] == sorted(rates[5:], reverse=True) and rates[5] == pytest.approx(2.0) and rates[-1] < 0.01


def test_every_tensor_moves_by_the_same_share_of_its_size():
    """And one of zeros as if it had a tenth of the mean size."""
    sizes = {"small": 0.1, "large": 2.9, "zeros": 0.0}
    parameters = {name: nn.Parameter(torch.full((4,), size)) for name, size in sizes.items()}
    weights = MasterWeights(parameters, learning_rate=0.01, steps=1)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    weights.take_step(0, ALONE)
    for name, parameter in parameters.items():
        moved = sizes[name] - float(parameter.detach().mean())
        assert moved == pytest.approx(0.01 * max(sizes[name], 0.1), rel=1e-3), name


def test_a_large_gradient_is_no_larger_than_one():
    weight = nn.Parameter(torch.zeros(4))
    weights = MasterWeights({"w": weight}, learning_rate=1.0, steps=10)
    weight.grad = torch.full((4,), 1e6)
    weights.take_step(0, ALONE)
    first = weights.adamw.state[weight]["exp_avg"] / (1 - weights.adamw.defaults["betas"][0])
    assert float(first.norm()) == pytest.approx(1.0, rel=1e-4)
