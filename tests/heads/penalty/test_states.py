"""What a penalty must not get wrong between runs, models and optimizers: found by review."""

import json

import pytest
import torch
from model_inputs import batch
from model_sizes import HEADS
from opening import gates_in
from unchanged import refused

from collab_heads import AttentionAdapter, get_adapter, inspect, prune_heads, swap_to_collaborative, swap_to_gated
from collab_heads.analysis import most_important
from collab_heads.contract import registry
from collab_heads.errors import ArgumentError, NonFiniteError, UnsupportedModelError
from collab_heads.heads.penalty.gates import border_scores
from collab_heads.training import HeadAdamW, HeadPenalty
from families import FAMILIES


def gated(name="bert"):
    model = FAMILIES[name].build()
    swap_to_gated(model)
    return model


def modules(model):
    return [gates for _, gates in gates_in(model)]


def scores_of(model):
    generator = torch.Generator().manual_seed(0)
    return {site.path: torch.rand(HEADS, generator=generator) for site in get_adapter(model).sites(model)}


def test_a_ranking_does_not_come_back_on_resuming(tmp_path):
    """The same call as in the first run, scores and all, then the state: the gates are those of the state."""
    model = gated()
    options = {"target_heads": 2, "steps": 20, "scores": scores_of(model), "seed": 1}
    penalty = HeadPenalty(model, **options)
    for _ in range(8):
        modules(model)[0].log_alpha.data += torch.tensor([0.5, -0.5, 1.0, 0.0])
        penalty.step()
    state = json.loads(json.dumps(penalty.state_dict()))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    again = HeadPenalty(loaded, **options)
    assert not torch.equal(modules(loaded)[0].log_alpha, modules(model)[0].log_alpha)
    again.load_state_dict(state)
    for ours, theirs in zip(modules(loaded), modules(model), strict=True):
        assert torch.equal(ours.log_alpha, theirs.log_alpha)
        assert all(map(torch.equal, ours.draw, theirs.draw))
    assert inspect(loaded).gates.open == inspect(model).gates.open == 6


@pytest.mark.parametrize("other", ({"seed": 2}, {"steps": 9}, {"target_heads": 3}, {"target_heads": {"enc-self": 2}}))
def test_the_state_of_another_penalty_is_refused(other):
    options = {"target_heads": 2, "steps": 20, "seed": 1}
    state = HeadPenalty(gated(), **options).state_dict()
    model = gated()
    penalty = HeadPenalty(model, **{**options, **other})
    with refused(model, ArgumentError, "not the state of this penalty", next(iter(other)).split("_")[0]):
        penalty.load_state_dict(state)
    pruned = FAMILIES["bert"].build()
    prune_heads(pruned, heads={"enc-self": [[0], []]})
    swap_to_gated(pruned)
    with pytest.raises(ArgumentError, match=r"gates \[4, 4\], not \[3, 4\]"):
        HeadPenalty(pruned, **options).load_state_dict(state)


@pytest.mark.parametrize("options", ({"gate_weight": 0.1}, {"target_heads": 3, "steps": 2}))
def test_frozen_gates_are_refused(options):
    """PEFT freezes them: heads would be chosen by noise alone."""
    model = gated()
    path = next(site.path for site in get_adapter(model).sites(model))
    modules(model)[0].requires_grad_(False)
    with refused(model, ArgumentError, path, "frozen", "requires_grad"):
        HeadPenalty(model, **options)


def test_a_penalty_without_any_wish_is_refused():
    model = gated()
    with refused(model, ArgumentError, "needs gate_weight or target_heads"):
        HeadPenalty(model)


def test_finished():
    penalty = HeadPenalty(gated(), target_heads=2, steps=2)
    seen = [penalty.finished]
    for _ in range(3):
        penalty.step()
        seen.append(penalty.finished)
    assert seen == [False, False, True, True]
    assert HeadPenalty(gated(), gate_weight=0.1).finished


def test_a_subset_that_nobody_draws_is_not_sampled(tmp_path):
    model = gated()
    HeadPenalty(model, target_heads=3, steps=2).step()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).train()
    assert torch.equal(modules(loaded)[0](), modules(loaded)[0].values())


def test_heads_may_go_in_the_middle_of_a_selection():
    model = gated()
    HeadPenalty(model, target_heads=3, steps=4).step()
    prune_heads(model, heads={"enc-self": [[1], []]})
    model.train()(**batch()).logits.sum().backward()
    assert [gates.num_heads for gates in modules(model)] == [3, 4]


def test_a_head_kept_for_its_role_does_not_move_the_border():
    scores = torch.tensor([5.0, 4.0, 1.0, -3.0, 0.5])
    chosen = torch.tensor([True, True, False, True, False])  # the fourth for its role's sake
    assert border_scores(scores, chosen, [torch.arange(5)]).unique().tolist() == [2.5]
    only = torch.tensor([False, False, False, True, False])
    assert border_scores(scores, only, [torch.arange(5)]).unique().tolist() == [5.0]
    ties = torch.zeros(4)
    assert border_scores(ties, torch.tensor([True, False, True, False]), [torch.arange(4)]).unique().tolist() == [0.0]


@pytest.mark.parametrize(
    "change, error, message",
    (
        (lambda scores, path: scores.pop(path), ArgumentError, "scores lack encoder.layer.1.attention.self"),
        (lambda scores, path: scores.update({path: [1.0, 2.0]}), ArgumentError, "shape (2,), it has 4 heads"),
        (lambda scores, path: scores[path].fill_(torch.nan), NonFiniteError, "NaN or inf"),
    ),
)
def test_scores_that_do_not_fit_are_refused(change, error, message):
    model = gated()
    scores = scores_of(model)
    change(scores, "encoder.layer.1.attention.self")
    with refused(model, error, message):
        HeadPenalty(model, target_heads=3, steps=2, scores=scores)
    if "lack" not in message:  # who asks for the best may leave sites out
        with pytest.raises(error):
            most_important(model, scores, 3)


def test_scores_may_be_lists_and_must_name_sites():
    model = gated()
    scores = {path: values.tolist() for path, values in scores_of(model).items()}
    HeadPenalty(model, target_heads=3, steps=2, scores=scores)
    assert sum(map(sum, most_important(model, scores, 3).values())) == 3
    with pytest.raises(ArgumentError, match="neither a role nor a path"):
        most_important(model, {**scores, "encoder.layer.7": [1.0]}, 3)
    with pytest.raises(ArgumentError, match="no meaning without"):
        HeadPenalty(model, gate_weight=0.1, scores=scores)


def test_a_fused_step_with_a_scaler_skips_the_gates_too():
    weights, gates = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.full((4,), 2.5))
    optimizer = HeadAdamW([{"params": [weights]}, {"params": [gates], "lr": 0.1, "shared": True}], lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    for factor, moves in ((torch.inf, False), (1.0, True)):
        before = weights.detach().clone(), gates.detach().clone()
        optimizer.zero_grad()
        scaler.scale((weights.sum() + gates.sum()) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        for now, then in zip((weights, gates), before, strict=True):
            assert torch.isfinite(now).all() and torch.equal(now, then) != moves


def test_a_closure_runs_first_and_its_loss_comes_back():
    gates = torch.nn.Parameter(torch.full((4,), 2.5))
    optimizer = HeadAdamW([{"params": [gates], "shared": True}], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (gates * torch.arange(4)).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 15.0
    assert "mean_square" in optimizer.state[gates] and "exp_avg_sq" not in optimizer.state[gates]
    assert torch.equal(gates.detach().argsort(descending=True), torch.arange(4))


@pytest.mark.parametrize(
    "kind, act",
    (
        ("collaborative", swap_to_collaborative),
        ("gated", swap_to_gated),
        ("prune", lambda model: prune_heads(model, heads={"enc-self": [[0], []]})),
    ),
)
def test_what_an_adapter_cannot_do_is_refused(kind, act, monkeypatch):
    class Limited(type(get_adapter(FAMILIES["bert"].build()))):
        capabilities = AttentionAdapter.capabilities - {kind}

    model = FAMILIES["bert"].build()
    monkeypatch.setitem(registry._ADAPTERS, "bert", Limited())
    with refused(model, UnsupportedModelError, "Limited does not say it can do", repr(kind)):
        act(model)
