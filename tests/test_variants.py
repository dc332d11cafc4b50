"""Families whose models differ in what works.

Heads of ESM with rotary positions can go, but share nothing; those of DeBERTa stay where positions have projections of
their own.
"""

import copy

import pytest
import torch
from changed_heads import mix
from heads_by_hand import assert_alike, by_hand, measure
from model_configs import esm_config
from model_inputs import batch
from model_runs import aligned, output
from model_sizes import EXACT64
from relevance_by_hand import begin_relevance, decoder_batch, full, without_biases
from test_head_contract import assert_folded_equals, assert_pruned_equals_gated
from transformers import DebertaV2ForSequenceClassification, EsmForMaskedLM, EsmForSequenceClassification, EsmModel
from unchanged import refused

import collab_heads
from collab_heads.adapters.esm import EsmAdapter, RotaryEsmAdapter
from collab_heads.errors import UnsupportedModelError
from families import FAMILIES, deberta, make

ROTARY = FAMILIES["esm-rotary"]


def test_the_config_decides():
    for positions, adapter in (("rotary", RotaryEsmAdapter), ("absolute", EsmAdapter)):
        model = make(EsmModel, esm_config(positions))
        assert type(collab_heads.get_adapter(model)) is type(collab_heads.get_adapter(model, EsmAdapter)) is adapter


@pytest.mark.parametrize("adapter", (None, EsmAdapter))
def test_what_heads_would_share_is_refused(adapter):
    model = ROTARY.build()
    for width in ({}, {"dim_shared_query_key": 16}):
        with refused(model, UnsupportedModelError, "rotary positions", "per_head", "compress()"):
            collab_heads.swap_to_collaborative(model, adapter, **width)
    with refused(model, UnsupportedModelError, "rotary positions", "per_head"):
        collab_heads.collaborative_config(model.config)


@pytest.mark.parametrize("empty", (False, True))
def test_gates_alphas_and_removal_work(empty):
    assert_pruned_equals_gated(ROTARY, None, empty, alphas=True)
    assert_folded_equals(ROTARY, "both", empty=empty, alphas=True)


def test_it_loads_again(tmp_path):
    model = ROTARY.build()
    collab_heads.prune_heads(model, heads={"enc-self": [[0, 2], [1]]}, batches=[batch()])
    collab_heads.swap_to_gated(model)
    mix(model)
    model.save_pretrained(tmp_path)
    again = aligned(EsmForSequenceClassification.from_pretrained(tmp_path).eval())
    assert torch.equal(output(again, batch()), output(aligned(model), batch()))
    assert collab_heads.get_adapter(EsmForMaskedLM.from_pretrained(tmp_path)).sites(again)


def test_heads_are_measured():
    model, inputs = ROTARY.build(), batch()
    model.double().set_attn_implementation("eager")
    found = measure(model, [inputs], exclude=[])
    assert_alike(found, by_hand(model, [inputs], [{"encoder": inputs["attention_mask"].bool()}]), atol=EXACT64)
    labels = {"labels": torch.tensor([0, 1, 1])}
    importance = collab_heads.analysis.head_importance(copy.deepcopy(model), [inputs | labels])
    assert min(float(values.min()) for values in importance.values()) > 0


def test_relevance_is_conserved():
    relevance, total = begin_relevance(without_biases(ROTARY.build()), full(decoder_batch("esm")))
    assert abs(total) > 1e-3
    assert abs(relevance - total) < 1e-8


def test_positions_with_projections_of_their_own_leave_neurons(tmp_path):
    model, inputs = deberta("own positions", share_att_key=False).build(), batch()
    stock = output(model, inputs)
    calls = (
        lambda: collab_heads.swap_to_collaborative(model),
        lambda: collab_heads.swap_to_gated(model),
        lambda: collab_heads.prune_heads(model, heads={"enc-self": [[0], [1]]}),
        lambda: collab_heads.compress(model, [inputs], 0.5),
    )
    for call in calls:
        with refused(model, UnsupportedModelError, "share_att_key is not true", "prune_neurons() works"):
            call()
    collab_heads.prune_neurons(model, [inputs], keep=24)
    assert float((output(model, inputs) - stock).abs().max()) > 1e-3
    model.save_pretrained(tmp_path)
    again = DebertaV2ForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(output(aligned(again), inputs), output(aligned(model), inputs))


def test_absolute_positions_share():
    assert collab_heads.swap_to_collaborative(FAMILIES["esm"].build(), dim_shared_query_key=16).sites
