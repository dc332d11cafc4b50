"""The shared second moment of gates; AdamW for everything else."""

import copy

import pytest
import torch
from torch import nn

from collab_heads.training import HeadAdamW

FLOAT32 = 1e-6  # the shared moment is float32; errors seen: 1e-7


def parameters(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def set_gradients(found, step, scale=1.0):
    generator = torch.Generator().manual_seed(step + 1)
    for p in found:
        p.grad = scale * torch.randn(p.shape, generator=generator, dtype=p.dtype)


def test_groups_without_the_key_are_adamw():
    ours, theirs = parameters((3, 2), (4,)), parameters((3, 2), (4,))
    made = [cls(found, lr=0.1, weight_decay=0.2) for cls, found in ((HeadAdamW, ours), (torch.optim.AdamW, theirs))]
    for step in range(4):
        for found, optimizer in zip((ours, theirs), made, strict=True):
            set_gradients(found, step)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_shared_group_keeps_proportions():
    """By the formula, over all elements of the group; weights in other groups are AdamW's."""
    gates, weights, alone = parameters((3,), (2,)), parameters((4,)), parameters((4,))
    optimizer = HeadAdamW(
        [{"params": weights}, {"params": gates, "lr": 0.3, "weight_decay": 0.0, "shared": True}], lr=0.1
    )
    other = torch.optim.AdamW(alone, lr=0.1)
    values, mean, square = torch.cat([g.detach().clone() for g in gates]), torch.zeros(5, dtype=torch.float64), 0.0
    for step in range(5):
        for found in (gates, weights, alone):
            set_gradients(found, step)
        kept = [g.grad.clone() for g in gates]
        gradient = torch.cat(kept)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * float(gradient.float().square().mean())
        rms = (square / (1 - 0.999 ** (step + 1))) ** 0.5
        values = values - 0.3 * mean / (1 - 0.9 ** (step + 1)) / (rms + 1e-8)
        optimizer.step()
        other.step()
        torch.testing.assert_close(torch.cat([g.detach() for g in gates]), values, rtol=0, atol=FLOAT32)
        assert all(torch.equal(g.grad, before) for g, before in zip(gates, kept, strict=True))
        assert torch.equal(weights[0], alone[0])


def test_a_shared_group_can_be_maximised():
    downhill, uphill = ({"params": parameters((3,)), "shared": True, "maximize": up} for up in (False, True))
    start = parameters((3,))[0].detach()
    optimizer = HeadAdamW([downhill, uphill], lr=0.1)
    for step in range(3):
        for group in (downhill, uphill):
            set_gradients(group["params"], step)
        optimizer.step()
    down, up = (group["params"][0].detach() - start for group in (downhill, uphill))
    assert torch.equal(down, -up) and bool(down.abs().min() > 0)


def test_a_shout_moves_further_than_a_whisper():
    (gates,) = parameters((2,))
    start, optimizer = gates.detach().clone(), HeadAdamW([{"params": [gates], "shared": True}], lr=0.1)
    for _ in range(10):
        gates.grad = torch.tensor([1.0, 0.01], dtype=torch.float64)
        optimizer.step()
    loud, quiet = (start - gates.detach()).tolist()
    assert 0.99 < loud / quiet / 100 < 1.01


def test_the_state_goes_on_where_it_was():
    unbroken, resumed = ([nn.Parameter(p.detach().float()) for p in parameters((3,), (2,))] for _ in range(2))
    first = HeadAdamW([{"params": unbroken, "shared": True}], lr=0.1)
    second = HeadAdamW([{"params": resumed, "shared": True}], lr=0.1)
    for step in range(6):
        set_gradients(unbroken, step)
        first.step()
        if step == 2:
            state = copy.deepcopy(first.state_dict())
            for ours, theirs in zip(resumed, unbroken, strict=True):
                ours.data.copy_(theirs.data)
            second.load_state_dict(state)
        elif step > 2:
            set_gradients(resumed, step)
            second.step()
    assert all(torch.equal(a, b) for a, b in zip(unbroken, resumed, strict=True))


def test_a_group_without_gradients_stays():
    (gates,) = parameters((2,))
    before = gates.detach().clone()
    HeadAdamW([{"params": [gates], "shared": True}], lr=0.1).step()
    assert torch.equal(gates, before)


@pytest.mark.parametrize("options", ({}, {"fused": True}, {"amsgrad": True}))
def test_a_completed_state_changes_no_step(options):
    """Parameters that wait for their first gradient take it as if they had no state."""
    plain, completed = ([nn.Parameter(p.detach().float()) for p in parameters((3,), (2,), (4,), (2,))] for _ in "12")
    optimizers = []
    for waiting, stepped, *gates in (plain, completed):
        groups = [{"params": [waiting, stepped]}, {"params": gates, "shared": True}]
        optimizers.append(HeadAdamW(groups, lr=0.1, **options))
    for step in range(4):
        for held, optimizer in zip((plain, completed), optimizers, strict=True):
            set_gradients(held, step)
            if step < 2:
                held[0].grad = held[3].grad = None
            optimizer.step()
        if step == 1:
            optimizers[1].complete_state()
            keys = [set(optimizers[1].state[held]) - {"mean_square"} for held in completed]
            assert keys[0] == keys[1] and keys[2] == keys[3]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(completed, plain, strict=True))


def test_the_first_of_a_group_may_have_no_gradient():
    """Its state holds the second moment of the group, and is completed all the same."""
    first, second = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = HeadAdamW([{"params": [first, second], "shared": True, "lr": 0.1}])
    second.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[first].keys() == {"mean_square"}
    optimizer.complete_state()
    assert optimizer.state[first].keys() == {"mean_square", "step", "exp_avg"}
    assert optimizer.state[second].keys() == {"step", "exp_avg"}


def stepped():
    """Two groups, the second shared, with state."""
    found = parameters((2, 3), (3,))
    optimizer = HeadAdamW([{"params": found[:1]}, {"params": found[1:], "shared": True}], lr=0.1)
    set_gradients(found, 0)
    optimizer.step()
    return optimizer


NAN = torch.tensor([float("nan"), 0, 0])


@pytest.mark.parametrize(
    "change, message",
    (
        (
            lambda state, groups: state[0].update(exp_avg=torch.zeros(1)),
            r"exp_avg of parameter 0 in group 0 is \[1\], and",
        ),
        (lambda state, groups: state[0].update(exp_avg_sq="x"), "exp_avg_sq of parameter 0 in group 0 is str, and"),
        (lambda state, groups: state[0].pop("exp_avg_sq"), "of parameter 0 in group 0 lacks exp_avg_sq"),
        (lambda state, groups: state[1].update(exp_avg=NAN), "exp_avg of parameter 0 in group 1 holds NaN or inf"),
        (lambda state, groups: state[0].update(step=torch.tensor(-1.0)), "step of parameter 0 in group 0 is .*-1"),
        (
            lambda state, groups: state[1].update(mean_square="x"),
            "mean_square of parameter 0 in group 1 is .*no number",
        ),
        (lambda state, groups: groups[0].update(lr="x"), "lr of group 0 is 'x', and no number from 0"),
        (lambda state, groups: groups[1].pop("shared"), "'shared' of group 1 is None, not True"),
    ),
)
def test_a_state_of_other_parameters_is_refused(change, message):
    """torch takes all of these, and reads beyond the end of moments that are too small."""
    state = stepped().state_dict()
    change(state["state"], state["param_groups"])
    with pytest.raises(ValueError, match=message):
        stepped().load_state_dict(state)
