import pytest
import torch
from model_runs import aligned, output, sites, swap
from model_sizes import EXACT, HEADS
from unchanged import refused

import collab_heads
from collab_heads.collaborative.plan import Curve, balance_errors, measure_curve
from collab_heads.errors import ArgumentError
from families import FAMILIES

BALANCED = {"allocation": "balanced", "refine_steps": 0}
BROAD = Curve(8, 64, 10, [(16, 0.6), (32, 0.3), (48, 0.1)])
NARROW = Curve(8, 64, 10, [(16, 0.06), (32, 0.03), (48, 0.01)])


def test_errors_between_the_measured_widths():
    assert [BROAD.error(width) for width in (0, 16, 24, 56, 64)] == pytest.approx([1.0, 0.6, 0.45, 0.05, 0.0])
    assert [BROAD.width(error) for error in (1.0, 0.6, 0.59, 0.0)] == [8, 16, 24, 64]


def test_a_wider_fit_is_never_taken_to_be_worse():
    noisy = Curve(8, 64, 10, [(16, 0.2), (32, 0.3), (48, 0.1)])
    assert noisy.error(32) == pytest.approx(0.2)


def test_widths_go_where_the_error_is():
    broad, narrow = balance_errors([BROAD, NARROW], budget=10 * 64)
    assert broad > narrow
    assert broad + narrow == 64
    assert max(BROAD.error(broad), NARROW.error(narrow)) < BROAD.error(32)


def test_equal_sites_get_equal_widths():
    assert balance_errors([BROAD] * 3, budget=3 * 10 * 32) == [32] * 3


def test_no_choice_within_the_budget_has_a_smaller_worst_error():
    curves, budget = [BROAD, NARROW, Curve(16, 64, 25, [(16, 0.4), (32, 0.2), (48, 0.1)])], 2000
    found = balance_errors(curves, budget)

    def cost(widths):
        return sum(w * c.cost for w, c in zip(widths, curves, strict=True))

    def worst(widths):
        return max(c.error(w) for w, c in zip(widths, curves, strict=True))

    grid = [range(c.unit, c.exact + 1, c.unit) for c in curves]
    best = min(worst(w) for a in grid[0] for b in grid[1] for c in grid[2] if cost(w := (a, b, c)) <= budget)
    assert cost(found) <= budget
    assert worst(found) == pytest.approx(best)


@pytest.mark.parametrize("budget, widths", ((10 * 128, [64, 64]), (10**9, [64, 64]), (1, [8, 8])))
def test_extreme_budgets(budget, widths):
    assert balance_errors([BROAD, NARROW], budget) == widths


def test_the_error_is_measured_at_multiples_of_the_unit_below_the_exact_width():
    seen = []
    curve = measure_curve(24, 96, 1, lambda width: seen.append(width) or 0.5)
    assert seen == [24, 48, 72]
    assert [width for width, _ in curve.points] == seen


def lopsided(name):
    """A model whose first site has all its scores in one dimension per head."""
    model = FAMILIES[name].build()
    module, adapter = next(iter(sites(model).values())), collab_heads.get_adapter(model)
    for projection in adapter.projections(module):
        projection.weight.data.unflatten(0, (HEADS, -1))[:, 1:] *= 1e-3
    return model


@pytest.mark.parametrize("name", ("bert", "marian", "t5", "albert-groups"))
def test_a_balanced_model_has_no_more_parameters_and_a_smaller_worst_error(name):
    reports = {}
    for allocation in ("uniform", "balanced"):
        model, inputs = lopsided(name), FAMILIES[name].inputs()
        reports[allocation] = swap(model, "shared", 16, batches=[inputs], allocation=allocation, refine_steps=1)
        assert torch.isfinite(output(model, inputs)).all()
    uniform, balanced = reports["uniform"], reports["balanced"]
    assert balanced.model_parameters_after <= uniform.model_parameters_after
    assert balanced.sites[0].dim < 16 < max(site.dim for site in balanced.sites)
    worst = [max(site.output_error_before for site in report.sites) for report in (uniform, balanced)]
    assert worst[1] < worst[0]
    assert all(site.dim % 8 == 0 for site in balanced.sites)


@pytest.mark.parametrize("name", ("bert", "marian"))
def test_heads_keep_widths_that_are_multiples_of_four(name):
    """Of 4 heads, 8 wide: nothing lies between 16 and 32, so a budget of 16 each leaves no choice."""
    report = swap(lopsided(name), "per_head", 9, batches=[FAMILIES[name].inputs()], **BALANCED)
    assert {site.dim for site in report.sites} == {4 * HEADS}
    assert "rounded up" not in str(report)


def test_a_balanced_model_loads_again(tmp_path):
    model, inputs = lopsided("bert"), FAMILIES["bert"].inputs()
    swap(model, "shared", 16, batches=[inputs], allocation="balanced")
    model.save_pretrained(tmp_path)
    assert torch.equal(output(aligned(type(model).from_pretrained(tmp_path).eval()), inputs), output(model, inputs))


@pytest.mark.parametrize("name", ("bert", "marian"))
def test_sites_that_were_to_stay_exact_do(name):
    """They have no error to measure; the budget of the others goes round among the others."""
    model, inputs = FAMILIES[name].build(), FAMILIES[name].inputs()
    first, second, *others = sites(model)
    widths = {first: 16, second: None, **dict.fromkeys(others, 0.5)}
    report = swap(model, "shared", widths, batches=[inputs], **BALANCED)
    assert report.sites[1].dim == EXACT
    assert sum(site.dim for site in report.sites) <= EXACT + 16 * (1 + len(others))


def test_a_budget_below_the_alignment_is_kept():
    model, inputs = FAMILIES["bert"].build(), FAMILIES["bert"].inputs()
    report = swap(model, "shared", 4, batches=[inputs], **BALANCED)
    assert sum(site.dim for site in report.sites) <= 8


def test_the_full_width_stays_exact():
    model, inputs = FAMILIES["bert"].build(), FAMILIES["bert"].inputs()
    report = swap(model, "shared", None, batches=[inputs], allocation="balanced")
    assert [site.dim for site in report.sites] == [EXACT, EXACT]


@pytest.mark.parametrize(
    "more, message",
    (({"allocation": "balanced"}, "pass batches"), ({"allocation": "even"}, "unknown allocation 'even'")),
)
def test_refusals(more, message):
    model = FAMILIES["bert"].build()
    with refused(model, ArgumentError, message):
        swap(model, "shared", 16, **more)
