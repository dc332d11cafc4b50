"""A plan is a value: what is saved is solved alike, and what is not a plan is refused."""

import json

import pytest
import torch
from compressing import batches_of
from model_runs import output
from unchanged import refused

from collab_heads import CompressionPlan, compress, plan
from collab_heads.errors import ArgumentError, DataError
from families import FAMILIES

BERT = FAMILIES["bert"]
BUDGETS = (1.0, 0.8, 0.5, 0.3)
ODD_SIZES = ("2", -1, 1.5, True, 10**6)  # of the heads of a site


@pytest.fixture(scope="module")
def made():
    return plan(
        BERT.build(), batches_of(BERT), refine_steps=2, sites=["enc-self", "enc-ffn"], multiple_of=2, shape="even"
    )


@pytest.fixture
def stored(made, tmp_path):
    return made.save(tmp_path / "plan.json")


@pytest.mark.slow
def test_a_loaded_plan_chooses_what_the_plan_does(made, stored):
    loaded = CompressionPlan.load(stored)
    assert (loaded.options, loaded.shape, loaded.sites, loaded.allowed) == (
        made.options,
        made.shape,
        made.sites,
        made.allowed,
    )
    for budget in BUDGETS:
        assert loaded.choose(budget) == made.choose(budget)
    assert loaded.within(0.2) == made.within(0.2) and loaded.to_dict() == made.to_dict()
    assert str(loaded) == str(made) and loaded.seconds == made.seconds > 0


def test_a_loaded_plan_compresses_as_the_plan_does(made, stored, monkeypatch):
    """Without new measurements of sites, also a copy of the model, in another order of things."""
    models = [BERT.build().eval() for _ in range(2)]
    expected = compress(models[0], batches_of(BERT), 0.5, **{**made.options.to_dict()})
    monkeypatch.setattr("collab_heads.compression.measurements.site_errors", None)
    report = compress(models[1], batches_of(BERT), 0.5, plan=CompressionPlan.load(stored))
    assert report.sites == expected.sites and report.costs == expected.costs
    assert report.measured_error == pytest.approx(expected.measured_error, rel=1e-6)
    torch.testing.assert_close(*(output(model, BERT.inputs()) for model in models), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_loaded_plan_says_what_it_lacks(made, stored):
    loaded, model = CompressionPlan.load(stored), BERT.build()
    with refused(model, ArgumentError, "has no batches to fit to"):
        compress(model, loaded, 0.5)
    with refused(model, ArgumentError, "seed: a plan has its own"):
        compress(model, batches_of(BERT), 0.5, plan=loaded, seed=1)
    with pytest.raises(ArgumentError, match="a plan that was loaded has measured nothing"):
        loaded.measure([0.5])
    compress(model, batches_of(BERT), 0.5, refine_steps=0)
    with refused(model, ArgumentError, "made for another model, or the model was changed since"):
        compress(model, batches_of(BERT), 0.5, plan=loaded)


@pytest.mark.parametrize("change", [lambda c: c["options"].update(multiple_of=8), lambda c: c["sites"].reverse()])
def test_a_plan_that_says_what_the_model_cannot_be_is_refused(stored, change):
    loaded, model = CompressionPlan.load(changed(stored, change)), BERT.build()
    with refused(model, ArgumentError, "made for another model, or the model was changed since"):
        compress(model, batches_of(BERT), 0.5, plan=loaded)


def test_two_plans_are_refused(made, stored):
    model = made.measured.model
    with refused(model, ArgumentError, "two plans"):
        compress(model, made, 0.5, plan=CompressionPlan.load(stored))


def changed(stored, change):
    content = json.loads(stored.read_text())
    change(content)
    stored.write_text(json.dumps(content))
    return stored


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("sites"),
        lambda content: content.update(version=99),
        lambda content: content.update(shape="round"),
        lambda content: content.update(sites=[]),
        lambda content: content.update(allowed=[]),
        lambda content: content["options"].update(of="money"),
        lambda content: content["options"].update(strange=1),
        lambda content: content["sites"][0]["costs"].pop(),
        lambda content: content["sites"][0]["errors"].__setitem__(0, float("nan")),
        lambda content: content["sites"][0]["choices"].pop(),
        lambda content: content["sites"][0]["whole"].update(wheels=4),
        lambda content: content["allowed"][0].__setitem__(-1, [10**6]),
        lambda content: content["allowed"][0].pop(),
        lambda content: content["sites"].append(content["sites"][0]),
        lambda content: content.update(seconds=-1),
        *(lambda content, size=size: content["sites"][0]["choices"][0].__setitem__(0, size) for size in ODD_SIZES),
    ],
)
def test_what_is_no_plan_is_refused(stored, change):
    with pytest.raises(DataError, match=r"plan\.json is not a plan of a compression"):
        CompressionPlan.load(changed(stored, change))


@pytest.mark.parametrize("sites", [True, 1, 0.5, object()])
def test_sites_that_are_not_names_are_refused(sites):
    with refused(BERT.build(), ArgumentError, "must be a role, a path or several of them"):
        compress(BERT.build(), batches_of(BERT), 0.5, sites=sites)


def test_a_report_says_what_a_tenth_of_the_cost_is_worth(made):
    choices = made.choose(0.5)
    share = made.share(choices)
    less, more = made.nearby(choices)
    assert (less, more) == tuple(made.predicted(made.choose(each * share)) for each in (0.9, 1.1))
    assert less >= made.predicted(choices) >= more and less > more
    assert made.nearby(made.choose(1.0))[1] is None and made.nearby(made.choose(made.least * 1.01))[0] is None
    model = BERT.build()
    made = plan(model, batches_of(BERT), refine_steps=0)
    report = compress(model, made, 0.5)
    less, more = made.nearby(made.choose(0.5))
    assert report.nearby_errors == (less, more)
    line = f"predicted error by parameters of layers: {less:.4f} with a tenth less, {more:.4f} with a tenth more"
    assert line in str(report)
