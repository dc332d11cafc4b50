"""Frozen alphas and the growth loss, against the paper's formula and single steps by hand."""

import json

import pytest
import torch
from accelerate import Accelerator
from changed_heads import loss
from later import Later
from model_runs import aligned
from model_sizes import EXACT64, FP32_NOISE, HEADS
from opening import alphas_in
from unchanged import assert_unchanged, snapshot

from collab_heads import swap_to_alpha, swap_to_gated
from collab_heads.errors import ArgumentError, ModelStateError
from collab_heads.training import HeadPenalty
from families import FAMILIES

steps = Later("collab_heads.training.loop.steps")

RADIUS, GAMMA, RATE = 1e-3, 40.0, 1e-2


def mixed(name="bert", **options):
    model = FAMILIES[name].build()
    swap_to_alpha(model, **options)
    return model


def alphas(model) -> list[torch.nn.Parameter]:
    return [mixing.alpha for _, mixing in alphas_in(model)]


def norms(model) -> list[float]:
    return [torch.linalg.matrix_norm(alpha.detach(), "nuc").item() for alpha in alphas(model)]


def growth_step(model, penalty, micro_batches=1) -> list[float]:
    """One plain SGD step on the penalty alone; how much every nuclear norm rose."""
    before = norms(model)
    optimizer = torch.optim.SGD(penalty.parameters(), lr=RATE)
    for _ in range(micro_batches):
        if (total := penalty.total()).requires_grad:
            (total / micro_batches).backward()
    penalty.before_step()
    optimizer.step()
    penalty.step()
    optimizer.zero_grad()
    return [after - first for after, first in zip(norms(model), before, strict=True)]


@pytest.mark.parametrize("micro_batches", (1, 3))
@pytest.mark.parametrize("name", ("bert", "marian", "t5"))
def test_a_step_raises_the_norm_and_the_next_does_not(name, micro_batches):
    """From the identity by eta gamma H; by nothing when that was more than the radius; then again."""
    model = mixed(name)
    penalty = HeadPenalty(model, growth=GAMMA, growth_radius=RADIUS)
    wanted = RATE * GAMMA * HEADS
    assert wanted > RADIUS
    for expected in (wanted, 0.0, wanted, 0.0):
        rises = growth_step(model, penalty, micro_batches)
        assert rises == pytest.approx([expected] * len(rises), abs=1e-5)


def test_growth_below_the_radius_goes_on():
    model = mixed()
    penalty = HeadPenalty(model, growth=GAMMA, growth_radius=2 * RATE * GAMMA * HEADS)
    for _ in range(3):
        assert growth_step(model, penalty) == pytest.approx([RATE * GAMMA * HEADS] * len(alphas(model)), rel=1e-4)


def test_value_is_the_hinge_of_the_paper():
    """gamma (||a_before|| + radius - ||a_now||), never below zero, for every site on its own."""
    model = mixed()
    first, second = alphas(model)
    penalty = HeadPenalty(model, growth=2.0, growth_radius=0.5)
    assert penalty.total().item() == pytest.approx(2 * 2.0 * 0.5, abs=1e-5)
    with torch.no_grad():
        first *= 1.1  # grows by 0.4 of 4
        second *= 2.0  # by more than the radius
    penalty.step()
    assert penalty.total().item() == pytest.approx(2.0 * (0.5 - 0.4), abs=1e-4)
    penalty.total().backward()
    assert first.grad.abs().sum() > 0
    assert second.grad.abs().sum() == 0
    metrics = penalty.metrics()
    assert metrics["alpha_nuclear_norm"] == pytest.approx((4.4 + 8.0) / 2, rel=1e-5)
    assert metrics["alpha_growth"] == pytest.approx((0.4 + 4.0) / 2, rel=1e-5)


def source_loss(model, inputs, labels) -> torch.Tensor:
    """The objective of Azov and Landau's code: summed over target tokens, growth beside it, divided by their number."""
    logits = model(**inputs, labels=labels).logits
    summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    pushed = sum(torch.norm(alpha, p="nuc").detach() + RADIUS - torch.norm(alpha, p="nuc") for alpha in alphas(model))
    return (summed + GAMMA * pushed) / (labels != -100).sum()


def test_beside_a_sum_it_is_as_strong_as_in_the_source():
    """The same gradient on the alphas as from the source's objective; beside the mean it is far stronger."""
    model = mixed("marian").double()
    inputs = FAMILIES["marian"].inputs()
    labels = inputs["decoder_input_ids"].clone()
    labels[1, 3:] = -100  # a shorter sentence
    tokens = int((labels != -100).sum())
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    source_loss(model, inputs, labels).backward()
    theirs = [alpha.grad.clone() for alpha in alphas(model)]
    for beside, same in (("sum", True), ("mean", False), (None, False)):
        model.zero_grad()
        penalty = HeadPenalty(model, growth=GAMMA, growth_radius=RADIUS, growth_beside=beside)
        (model(**inputs, labels=labels).loss + penalty.total(tokens=tokens)).backward()
        for alpha, other in zip(alphas(model), theirs, strict=True):
            assert torch.allclose(alpha.grad, other, rtol=0, atol=EXACT64) == same
    assert penalty.total().item() == pytest.approx(GAMMA * RADIUS * len(theirs), rel=1e-5)
    summed = HeadPenalty(model, growth=GAMMA, growth_radius=RADIUS, growth_beside="sum")
    assert summed.total(tokens=tokens).item() == pytest.approx(penalty.total().item() / tokens, rel=1e-5)


@pytest.mark.parametrize("tokens", (None, 0, -3, 2.0, True))
def test_beside_a_sum_it_asks_for_the_number_of_tokens(tokens):
    """From the first step on, also while the alphas do not learn; without a push there is nothing to divide."""
    penalty = HeadPenalty(mixed(), growth=GAMMA, growth_beside="sum", alpha_start=3)
    with pytest.raises(ArgumentError, match=rf"call total\(batch, tokens=.*, not {tokens!r}"):
        penalty.total(tokens=tokens)
    assert HeadPenalty(mixed(), growth=0.0, growth_beside="sum").total(tokens=tokens).item() == 0.0


def test_the_loop_divides_by_the_tokens_of_all_micro_batches():
    """An optimizer step adds gamma / tokens once, whatever the sizes of its micro-batches."""
    model = mixed("marian").train()
    penalty = HeadPenalty(model, growth=GAMMA, growth_radius=10.0, growth_beside="sum")
    optimizer = torch.optim.SGD(penalty.parameters(), lr=RATE)
    before = [alpha.detach().clone() for alpha in alphas(model)]
    weights = (3, 13)

    def nothing(model, batch):
        return 0.0 * sum(parameter.sum() for parameter in model.parameters())

    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    steps.optimizer_step(accelerator, model, optimizer, [{}, {}], weights, 0.0, penalty, nothing)
    rise = RATE * GAMMA / sum(weights)  # of every alpha, from the identity
    for alpha, old in zip(alphas(model), before, strict=True):
        torch.testing.assert_close(alpha.detach() - old, rise * torch.eye(HEADS), rtol=1e-4, atol=FP32_NOISE)


def test_weights_per_role():
    model = mixed("marian")
    penalty = HeadPenalty(model, growth={"enc-self": GAMMA, "dec-enc": GAMMA / 2}, growth_radius=RADIUS)
    expected = {"enc-self": RATE * GAMMA * HEADS, "dec-enc": RATE * GAMMA * HEADS / 2, "dec-self": 0.0}
    rises = growth_step(model, penalty)
    for (site, _), rise in zip(alphas_in(model), rises, strict=True):
        assert rise == pytest.approx(expected[site.role], abs=1e-5)


@pytest.mark.parametrize(
    "growth, learning",
    (
        ({"enc-self": GAMMA, "dec-self": 0.0, "dec-enc": 0}, {"enc-self"}),
        ({"enc-self": GAMMA, "dec-self": 0.0}, {"enc-self", "dec-enc"}),  # what is left out learns without a push
        ({"dec-self": GAMMA, "enc-self": 0}, {"dec-self", "dec-enc"}),
        ({"enc-self": 0, "dec-self": 0, "dec-enc": 0}, set()),
        (0.0, {"enc-self", "dec-self", "dec-enc"}),  # one number for all: no push, and all learn
        (None, {"enc-self", "dec-self", "dec-enc"}),
    ),
)
def test_a_role_that_is_given_0_never_trains_its_alphas(growth, learning):
    """As in the source, whose ratios say so; before the start and after it, nor does the optimizer know of them."""
    model = mixed("marian").train()
    inputs = FAMILIES["marian"].inputs()
    penalty = HeadPenalty(model, growth=growth, alpha_start=1)
    optimizer = torch.optim.AdamW([{"params": penalty.others(model)}, *penalty.groups()], lr=RATE)
    sites = [site for site, _ in alphas_in(model)]
    before = [alpha.detach().clone() for alpha in alphas(model)]
    for step in range(3):
        (loss(model, inputs) + penalty.total()).backward()
        penalty.before_step()
        optimizer.step()
        optimizer.zero_grad()
        penalty.step()
        for site, alpha, old in zip(sites, alphas(model), before, strict=True):
            learns = step > 0 and site.role in learning
            assert torch.equal(alpha, old) != learns
            assert bool(optimizer.state.get(alpha)) == learns


@pytest.mark.parametrize("kind", ("adamw", "sgd"))
def test_frozen_until_their_start(kind):
    """No gradient, so no optimizer moves them or keeps moments of them; from the start on they are trained."""
    model = mixed().train()
    inputs, start = FAMILIES["bert"].inputs(), 2
    penalty = HeadPenalty(model, growth=GAMMA, growth_radius=1e3, alpha_start=start)
    kinds = {"adamw": torch.optim.AdamW, "sgd": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, weight_decay=0.1)}
    optimizer = kinds[kind]([{"params": penalty.others(model)}, *penalty.groups()])
    assert all(alpha.requires_grad for alpha in alphas(model))
    weight = model.base_model.encoder.layer[0].output.dense.weight
    for step in range(4):
        before, others = [alpha.detach().clone() for alpha in alphas(model)], weight.detach().clone()
        extra = penalty.total()
        assert (extra.item() > 0) == (step >= start)
        (loss(model, inputs) + extra).backward()
        penalty.before_step()
        optimizer.step()
        optimizer.zero_grad()
        penalty.step()
        assert not torch.equal(weight, others)
        for alpha, old in zip(alphas(model), before, strict=True):
            assert torch.equal(alpha, old) == (step < start)
            assert bool(optimizer.state.get(alpha)) == (step >= start)


def test_state_goes_on_exactly(tmp_path):
    """Also in the step after one that grew, where the push is off."""
    model = mixed("marian")
    options = {"growth": GAMMA, "growth_radius": RADIUS, "alpha_start": 1}
    penalty = HeadPenalty(model, **options)
    for _ in range(2):
        growth_step(model, penalty)
    model.save_pretrained(tmp_path)
    state = json.loads(json.dumps(penalty.state_dict()))
    loaded = aligned(type(model).from_pretrained(tmp_path))
    resumed = HeadPenalty(loaded, **options)
    resumed.load_state_dict(state)
    for expected in (0.0, RATE * GAMMA * HEADS):
        assert resumed.total().item() == penalty.total().item()
        ours, theirs = growth_step(model, penalty), growth_step(loaded, resumed)
        assert ours == theirs == pytest.approx([expected] * len(ours), abs=1e-5)
        assert resumed.state_dict() == penalty.state_dict()
    fresh = HeadPenalty(loaded, **options | {"growth": 1.0})
    with pytest.raises(ArgumentError, match="not the state of this penalty: growth"):
        fresh.load_state_dict(state)


def test_a_state_says_what_growth_stands_beside():
    """States from before there was a choice are of growth beside the mean."""
    model = mixed()
    mean, summed = (HeadPenalty(model, growth=GAMMA, growth_beside=beside) for beside in (None, "sum"))
    old = mean.state_dict()
    assert old["alphas"].pop("beside") == "mean"
    mean.load_state_dict(old)
    summed.load_state_dict(summed.state_dict())
    with pytest.raises(ArgumentError, match="not the state of this penalty: beside 'mean', not 'sum'"):
        summed.load_state_dict(old)


def test_a_state_says_which_alphas_never_learn():
    """One from before, in which they learned, cannot go on without them."""
    model = mixed("marian")
    penalty = HeadPenalty(model, growth={"enc-self": GAMMA, "dec-self": 0, "dec-enc": 0.0})
    state = penalty.state_dict()
    penalty.load_state_dict(state)
    assert state["alphas"].pop("frozen") == ["dec-self", "dec-enc"]
    with pytest.raises(
        ArgumentError, match=r"not the state of this penalty: frozen \[\], not \['dec-self', 'dec-enc'\]"
    ):
        penalty.load_state_dict(state)


def test_a_damaged_state_is_refused():
    penalty = HeadPenalty(mixed(), growth=1.0)
    state = penalty.state_dict()
    for broken, message in (({"done": 0}, "it has no before"), ({**state["alphas"], "before": [1.0]}, "1 norms")):
        with pytest.raises(ArgumentError, match=f"not the state of this penalty: .*{message}"):
            penalty.load_state_dict({"alphas": broken})


def test_a_refused_penalty_changes_nothing():
    """Whichever argument is wrong: gates stay of their kind, nothing listens."""
    model = mixed()
    swap_to_gated(model)
    before = snapshot(model)
    for wrong in ({"disagreement": -1.0}, {"growth": -1.0}, {"growth": 1.0, "growth_radius": -1.0}):
        with pytest.raises(ArgumentError):
            HeadPenalty(model, target_heads=4, steps=2, **wrong)
    with pytest.raises(ArgumentError):
        HeadPenalty(model, target_heads=400, steps=2, disagreement=1.0)
    assert_unchanged(model, before)


def test_norms_are_taken_in_float32():
    model = mixed().to(torch.bfloat16)
    penalty = HeadPenalty(model, growth=1.0)
    assert penalty.total().dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert penalty.total().dtype == torch.float32


def test_gates_and_alphas_together():
    """Both parts in one penalty: groups of their own, one total, both states."""
    model = mixed("marian").train()
    swap_to_gated(model)
    penalty = HeadPenalty(model, gate_weight=0.5, growth=GAMMA, growth_radius=RADIUS)
    gates, mixings = penalty.groups(gate_lr=0.3, alpha_lr=0.2)
    assert (gates["lr"], mixings["lr"]) == (0.3, 0.2)
    assert {id(p) for p in mixings["params"]} == {id(alpha) for alpha in alphas(model)}
    assert "lr" not in penalty.groups()[1]
    own = {id(p) for group in penalty.groups() for p in group["params"]}
    assert not own & {id(p) for p in penalty.others(model)}
    assert len(own) + len(penalty.others(model)) == sum(p.requires_grad for p in model.parameters())
    alone = HeadPenalty(model, growth=GAMMA, growth_radius=RADIUS).total().item()
    assert penalty.total().item() == pytest.approx(alone + 0.5 * penalty.metrics()["heads_expected"], rel=1e-5)
    assert {"heads_open", "alpha_nuclear_norm"} <= penalty.metrics().keys()
    with pytest.raises(ArgumentError, match="it is for alphas, not alphas, gates"):
        penalty.load_state_dict({"alphas": penalty.state_dict()["alphas"]})


def test_a_skipped_step_is_no_step():
    """fp16 skips steps: growth is that of the last real one, and the start waits; gates' schedules go on."""
    model = mixed()
    swap_to_gated(model)
    options = {"target_heads": 4, "steps": 9, "growth": GAMMA, "growth_radius": RADIUS, "alpha_start": 1}
    penalty = HeadPenalty(model, **options)
    alpha_part, gate_part = penalty.parts["alphas"], penalty.parts["gates"]
    penalty.step(skipped=True)
    assert (alpha_part.done, gate_part.done) == (0, 1)
    penalty.step()
    assert alpha_part.started
    growth_step(model, penalty)
    assert not alpha_part.total().any()  # the step before grew
    penalty.step(skipped=True)
    assert not alpha_part.total().any()
    penalty.step()
    assert alpha_part.total() > 0


def test_the_loop_tells_of_skipped_steps(monkeypatch):
    model, seen = mixed().train(), []
    penalty = HeadPenalty(model, growth=GAMMA)
    monkeypatch.setattr(penalty, "step", lambda *, skipped: seen.append(skipped))
    batch = {**FAMILIES["bert"].inputs(), "labels": torch.tensor([0, 1, 1])}
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    optimizer = torch.optim.SGD([{"params": penalty.others(model)}, *penalty.groups()], lr=RATE)
    for skipped in (True, False):
        monkeypatch.setattr(Accelerator, "optimizer_step_was_skipped", skipped)
        steps.optimizer_step(accelerator, model, optimizer, [batch], [3], 0.0, penalty)
    assert seen == [True, False]


REFUSED = (
    ({"growth": -1.0}, "growth -1.0 must be a number, 0 or more"),
    ({"growth": True}, "growth True must be a number"),
    ({"growth": {"dec-self": 1.0}}, "unknown role in growth 'dec-self'.*enc-self"),
    ({"growth": 1.0, "growth_radius": 0.0}, "growth_radius 0.0 must be a number above 0"),
    ({"growth": 1.0, "alpha_start": -1}, "alpha_start -1 must be a number of optimizer steps"),
    ({"growth": 1.0, "alpha_start": 0.5}, "alpha_start 0.5"),
    ({"growth": {"enc-self": -2.0}}, "growth -2.0 of enc-self must be"),
    ({"growth": 1.0, "growth_beside": "summ"}, r"unknown growth_beside 'summ' \(did you mean 'sum'\?\); known: mean"),
    ({"growth_beside": "sum"}, "growth_beside 'sum' has no meaning without growth"),
    ({"growth_radius": 1e-3}, "growth_radius 0.001 has no meaning without growth"),
    ({"growth": 1.0, "steps": 3}, "steps 3 has no meaning without target_heads"),
    ({"growth": 1.0, "scores": {}}, "scores {} has no meaning without target_heads"),
)


@pytest.mark.parametrize("options, message", REFUSED)
def test_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        HeadPenalty(mixed(), **options)


def test_needs_alphas():
    model = FAMILIES["bert"].build()
    with pytest.raises(ModelStateError, match="no alphas: call swap_to_alpha first"):
        HeadPenalty(model, growth=1.0)
    with pytest.raises(ArgumentError, match="needs gate_weight or target_heads"):
        HeadPenalty(model)
    with pytest.raises(ArgumentError, match="alpha_start 3 has no meaning without alphas: call swap_to_alpha"):
        HeadPenalty(model, disagreement=1.0, alpha_start=3)
    frozen = mixed().requires_grad_(False)
    with pytest.raises(ArgumentError, match=r"the alphas of .* are frozen"):
        HeadPenalty(frozen, growth=1.0)


@pytest.mark.parametrize("cast_afterwards", (False, True))
def test_the_diagonal_learns_in_a_model_of_half_precision(cast_afterwards):
    """Next to 1 bfloat16 has no number within 0.004: smaller steps would be lost, and the norm would not grow."""
    model = FAMILIES["bert"].build()
    if not cast_afterwards:
        model.bfloat16()
    swap_to_alpha(model)
    if cast_afterwards:
        model.bfloat16()
    penalty = HeadPenalty(model, growth=GAMMA, growth_radius=1.0)
    optimizer = torch.optim.SGD(penalty.parameters(), lr=1e-5)
    penalty.total().backward()
    optimizer.step()
    for alpha in alphas(model):
        assert alpha.dtype == torch.float32
        torch.testing.assert_close(alpha.diagonal() - 1, torch.full((HEADS,), 1e-5 * GAMMA), rtol=0, atol=FP32_NOISE)
