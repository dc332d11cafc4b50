"""compress takes models and batches as they come: with labels, in inference mode, with probabilities of 0."""

import math

import pytest
import torch
from compressing import batches_of
from unchanged import assert_unchanged, refused, snapshot

from collab_heads import compress, plan
from collab_heads.compression.probe import Probe
from collab_heads.errors import ArgumentError, CalibrationError, NonFiniteError, UnsupportedModelError
from families import FAMILIES

BERT, MARIAN = FAMILIES["bert"], FAMILIES["marian"]
QUICK = {"refine_steps": 4}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "bert-decoder"])
def test_inference_mode_leaves_a_model_that_trains(name):
    family, inside = FAMILIES[name], FAMILIES[name].build()
    with torch.inference_mode():
        report = compress(inside, batches_of(family), 0.5, **QUICK)
    outside = family.build()
    assert report.measured_error == compress(outside, batches_of(family), 0.5, **QUICK).measured_error
    inside(**family.inputs()).logits.sum().backward()
    assert not any(parameter.is_inference() for parameter in inside.parameters())


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_that_was_made_in_inference_mode_is_refused(inside):
    with torch.inference_mode():
        made = BERT.build()
    with refused(made, UnsupportedModelError, "made under torch.inference_mode()"), torch.inference_mode(inside):
        compress(made, batches_of(BERT), 0.5, **QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("labels", [torch.zeros(3, dtype=torch.long), torch.zeros(3, 2)], ids=["one", "several"])
def test_labels_leave_the_config_as_it_was(labels):
    """Transformers guess the kind of the problem from them, and note it."""
    model = BERT.build()
    before = snapshot(model)
    plan(model, [{**batch, "labels": labels} for batch in batches_of(BERT)])
    assert_unchanged(model, before)


@pytest.mark.slow
def test_a_model_that_returns_tuples():
    model, named = BERT.build(), BERT.build()
    model.config.return_dict = False
    reports = [compress(each, batches_of(BERT), 0.5, **QUICK) for each in (model, named)]
    assert reports[0].measured_error == reports[1].measured_error
    assert isinstance(model(**BERT.inputs()), tuple)


def test_logits_that_are_no_numbers_are_refused():
    model = BERT.build()
    with torch.no_grad():
        model.classifier.weight[0, 0] = math.nan
    with refused(model, NonFiniteError, "puts out NaN or inf"):
        compress(model, batches_of(BERT), 0.5)


@pytest.mark.slow
def test_tokens_that_a_model_rules_out_add_nothing():
    model = MARIAN.build()
    model.final_logits_bias[:, 1] = -math.inf
    report = compress(model, batches_of(MARIAN), 0.5, **QUICK)
    assert 0 < report.predicted_error < math.inf
    assert 0 < report.measured_error < math.inf


def test_too_few_examples_to_see_numbers_vary_are_counted():
    model = BERT.build()
    model.config.problem_type = "regression"
    with refused(model, CalibrationError, "the same for the 1 calibration examples", "one example in eight"):
        compress(model, batches_of(BERT), 0.5)


def interrupted(_):
    raise KeyboardInterrupt


def test_an_error_while_the_result_is_measured_leaves_the_model_as_it_was(monkeypatch):
    model = BERT.build()
    made, before = plan(model, batches_of(BERT), **QUICK), snapshot(model)
    monkeypatch.setattr(Probe, "error", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compress(model, made, 0.5)
    assert_unchanged(model, before)


@pytest.mark.slow
def test_the_encoder_of_a_translator_caches_nothing():
    model = MARIAN.build()
    report = compress(model, batches_of(MARIAN), 0.5, of="cache", **QUICK)
    for site in report.sites:
        is_of_encoder = site.role == "enc-self"
        assert (site.cache_before == 0) == is_of_encoder
        assert not is_of_encoder or site.parameters_after == site.parameters_before


@pytest.mark.slow
def test_a_budget_of_what_the_sites_have_none_of_is_refused():
    model = MARIAN.build()
    with refused(model, ArgumentError, "of='cache'", "have none of it"):
        compress(model, batches_of(MARIAN), 0.5, of="cache", sites="enc-self")
    assert "cached elements" not in str(compress(model, batches_of(MARIAN), 0.5, sites="enc-self", **QUICK))


@pytest.mark.slow
def test_only_a_decoder_has_a_cache_to_report():
    encoder, translator = (str(compress(each.build(), batches_of(each), 0.5, **QUICK)) for each in (BERT, MARIAN))
    for word in ("cached elements of layers", "cache/token"):
        assert word not in encoder and word in translator
    assert "e+0" not in encoder + translator
