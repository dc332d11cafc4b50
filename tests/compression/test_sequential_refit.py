"""The refit in order: least squares near the present weights, which makes up for the errors of the sites before."""

import pytest
import torch
from compressing import batches_of
from model_runs import aligned, output
from unchanged import assert_unchanged, snapshot

from collab_heads import compress, plan
from collab_heads.compression import plan as planning
from collab_heads.compression import sequential_refit
from collab_heads.compression.parts.table import install
from collab_heads.compression.residual_readers import find_readers
from collab_heads.compression.sequential_refit import RefittedOutput, Sums, refitted_in_order
from collab_heads.model.apply_state import OutputWeights, undone
from families import FAMILIES

MANY = 24  # batches, each of them a portion: enough for a ridge to be chosen


def shifted(site):
    """A site whose output is wrong by a constant."""
    weight = site.output_weight().double()
    shift = torch.randn(len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {site.path: [RefittedOutput(OutputWeights(weight, shift))]}


def measured_of(name, count=MANY):
    return plan(FAMILIES[name].build().eval(), batches_of(FAMILIES[name], count), refine_steps=0)


@pytest.mark.parametrize("has_bias", [True, False])
def test_least_squares_near_the_present_weights(has_bias):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 6, generator=generator, dtype=torch.float64)
    rows[:, -1] = 1
    targets, present = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (50, 6))
    sums, ridge = Sums(rows.mT @ rows, rows.mT @ targets), 0.3
    size = (rows[:, :-1].square().sum(0)).mean()
    used = 6 if has_bias else 5
    near = torch.eye(6, dtype=torch.float64)[:5, :used] * (ridge * size).sqrt()
    missing = targets - rows @ present
    change = torch.linalg.lstsq(
        torch.cat([rows[:, :used], near]), torch.cat([missing, torch.zeros(5, 3, dtype=torch.float64)])
    ).solution
    found = sums.solve(present, ridge, has_bias)
    torch.testing.assert_close(found[:used], present[:used] + change)
    torch.testing.assert_close(found[used:], present[used:], rtol=0, atol=0)
    square = (rows @ found - targets).square().sum() - targets.square().sum()
    assert sums.error(found) == pytest.approx(float(square))


def test_a_site_without_inputs_gets_a_bias():
    targets = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ones = torch.ones(9, 1, dtype=torch.float64)
    found = Sums(ones.mT @ ones, ones.mT @ targets).solve(torch.zeros(1, 3, dtype=torch.float64), 0.1, True)
    torch.testing.assert_close(found, targets.mean(0, keepdim=True))


@pytest.mark.parametrize("name", ["bert", "gpt2", "marian"])
def test_an_error_that_can_be_undone_is_undone(name):
    """A constant that is added to the output of the first site is taken out of it again."""
    made = measured_of(name)
    wrong = shifted(made.measured.sites[0])
    right = refitted_in_order(made.measured, wrong)
    assert made.measured_error(wrong) > 0.1
    assert made.measured_error(right) < 1e-3 * made.measured_error(wrong)


def test_later_sites_make_up_for_earlier_ones():
    """The first site stays wrong by a constant; the second one takes this out of the residual stream."""
    made = measured_of("bert")
    first, second = made.measured.sites[:2]
    example = batches_of(FAMILIES["bert"], 1)[0]
    readers = find_readers(made.measured.model, made.measured.sites, example)
    (reader,) = [reader for reader in readers if reader.site.path == second.path]
    shown, _ = sequential_refit.examples_of(made.measured)
    targets = sequential_refit.targets_of(made.measured.model, [reader], shown)[reader.output]
    with undone(made.measured.model, made.measured.sites):
        install(made.measured.model, made.measured.adapter, shifted(first))
        found = sequential_refit.refit(made.measured.model, reader, shown, targets)
        before = made.measured.probe.error()
        install(made.measured.model, made.measured.adapter, {second.path: [RefittedOutput(found)]})
        assert made.measured.probe.error() < 0.9 * before


def test_the_error_falls_and_the_model_stays(family):
    made = plan(family.build(), batches_of(family, 64), refine_steps=0)
    before = snapshot(made.measured.model)
    fitted = made.fit(made.choose(0.4))
    assert_unchanged(made.measured.model, before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "refitted_in_order", lambda measured, fitted: {})
        plain = made.fit(made.choose(0.4))
    kept = [fit for fits in fitted.values() for fit in fits if isinstance(fit, RefittedOutput)]
    assert made.measured_error(fitted) <= made.measured_error(plain)
    if family.name == "bert":
        assert kept


def test_a_refit_that_does_not_help_is_left_out(monkeypatch):
    made = measured_of("bert")
    choices = made.choose(0.4)
    worse = made.fit(made.choose(0.2))
    monkeypatch.setattr(planning, "refitted_in_order", lambda measured, fitted: worse)
    assert made.fit(choices) is not worse
    better = made.fit(made.choose(0.9))
    monkeypatch.setattr(planning, "refitted_in_order", lambda measured, fitted: better)
    assert made.fit(choices) is better


def test_few_examples_are_not_fitted_to():
    made = measured_of("bert", 4)
    assert refitted_in_order(made.measured, made.fit(made.choose(0.4))) == {}
    assert refitted_in_order(measured_of("bert").measured, {}) == {}


def test_many_tokens_are_sampled(monkeypatch):
    made = measured_of("bert")
    shown, tokens = sequential_refit.examples_of(made.measured)
    monkeypatch.setattr(sequential_refit, "MOST_TOKENS", tokens // 2)
    half, fewer = sequential_refit.examples_of(made.measured)
    assert (len(half), fewer) == (-(-len(shown) // 2), tokens // 2)
    monkeypatch.setattr(sequential_refit, "TOKENS", tokens)
    assert len(sequential_refit.examples_of(made.measured)[0]) == -(-len(shown) // len(made.measured.sites))


def test_groups_of_targets_do_not_change_the_result(monkeypatch):
    made = measured_of("bert")
    fitted = made.fit(made.choose(0.4))
    whole = refitted_in_order(made.measured, fitted)
    monkeypatch.setattr(sequential_refit, "TARGETS", 1)
    parts = refitted_in_order(made.measured, fitted)
    assert whole.keys() == parts.keys()
    outputs = [[fit.output.weight for fit in fits if isinstance(fit, RefittedOutput)] for fits in whole.values()]
    again = [[fit.output.weight for fit in fits if isinstance(fit, RefittedOutput)] for fits in parts.values()]
    torch.testing.assert_close(outputs, again, rtol=0, atol=0)
    assert any(outputs)


def test_the_result_loads_again(tmp_path):
    family = FAMILIES["bert"]
    model = family.build().eval()
    compress(model, batches_of(family, MANY), 0.4, refine_steps=0)
    model.save_pretrained(tmp_path)
    again = aligned(type(model).from_pretrained(tmp_path)).eval()
    assert torch.equal(output(again, family.inputs()), output(aligned(model), family.inputs()))


def test_a_plan_fits_while_changes_are_tried():
    """In a context in which copies stand in for the modules of the sites."""
    made = measured_of("bert", 64)
    choices = made.choose(0.4)
    outside = made.measured_error(made.fit(choices))
    with undone(made.measured.model, made.measured.sites):
        inside = made.fit(choices)
    assert made.measured_error(inside) == pytest.approx(outside)
