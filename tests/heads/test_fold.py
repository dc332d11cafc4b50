"""fold_heads: back to a stock model, and what is refused."""

import json

import pytest
import torch
from changed_heads import change_queries, changed, output_projections, set_gates
from model_runs import output
from model_sizes import EXACT64, HEAD_WIDTH, HEADS
from torch import nn
from unchanged import refused

from collab_heads import fold_heads, prune_heads, swap_to_collaborative, swap_to_gated
from collab_heads.errors import ModelStateError
from families import FAMILIES

LAYER_0, LAYER_1 = "encoder.layer.0.attention.self", "encoder.layer.1.attention.self"


def bert():
    return FAMILIES["bert"].build()


def test_gates_go_into_the_columns_of_the_output():
    model, stock = bert().double(), bert().double()
    swap_to_gated(model)
    for projection in output_projections(model).values():
        set_gates(projection, (3.0, -1.0, 0.5, 0.0))
    gates = projection.gates.values().double()
    assert fold_heads(model).gates == (LAYER_0, LAYER_1)
    for ours, theirs in zip(output_projections(model).values(), output_projections(stock).values(), strict=True):
        assert type(ours) is nn.Linear
        expected = theirs.weight * gates.repeat_interleave(HEAD_WIDTH)
        torch.testing.assert_close(ours.weight, expected, rtol=0, atol=EXACT64)
        assert torch.equal(ours.bias, theirs.bias)


def test_removed_heads_come_back_as_zeros():
    model, stock = bert(), bert()
    prune_heads(model, heads={"enc-self": [[0, 1, 2, 3], [0, 2]]})
    fold_heads(model)
    for layer, kept in enumerate(([], [1, 3])):
        rows = torch.tensor([head in kept for head in range(HEADS)]).repeat_interleave(HEAD_WIDTH)
        ours, theirs = (m.bert.encoder.layer[layer].attention for m in (model, stock))
        for name in ("query", "key", "value"):
            for part in ("weight", "bias"):
                found, original = (getattr(getattr(m.self, name), part) for m in (ours, theirs))
                assert torch.equal(found[rows], original[rows])
                assert found[~rows].abs().max() == 0
        assert torch.equal(ours.output.dense.weight, theirs.output.dense.weight * rows)
        assert (ours.self.num_attention_heads, ours.self.all_head_size) == (HEADS, HEADS * HEAD_WIDTH)
        assert ours.output.dense.in_features == HEADS * HEAD_WIDTH


def test_report():
    model = changed(FAMILIES["bert"], state="both", dtype=torch.float32)
    before, stock = model.num_parameters(), bert().num_parameters()
    report = fold_heads(model)
    assert report.gates == (LAYER_1,)
    assert report.restored == {LAYER_0: (0, 1, 2, 3), LAYER_1: (1,)}
    assert (report.model_parameters_before, report.model_parameters_after) == (before, stock)
    stored = json.loads(json.dumps(report.to_dict()))
    assert stored["restored"][LAYER_1] == [1]
    text = str(report)
    assert "gates of 1 sites and alphas of 0 folded into W_O, 5 removed heads restored as zeros" in text
    assert f"{before:,} -> {stock:,}: plain transformers loads it" in text


@pytest.mark.parametrize("kind", ("shared", "per_head"))
@pytest.mark.parametrize("state", (None, "gated", "pruned", "both"))
def test_collaborative_models(kind, state):
    if state is None:
        model = bert()
        change_queries(model, kind)
    else:
        model = changed(FAMILIES["bert"], kind, state)
    reason = {"shared": "share their queries and keys", "per_head": "heads of another width"}[kind]
    with refused(model, ModelStateError, LAYER_1, reason + " have no stock form"):
        fold_heads(model)


def test_only_collaborative_sites_are_named():
    model = bert()
    swap_to_gated(model)
    swap_to_collaborative(model, sites=LAYER_0)
    with refused(model, ModelStateError, f"{LAYER_0}: heads that share") as caught:
        fold_heads(model)
    assert LAYER_1 not in str(caught.value)


def test_nothing_to_fold():
    model = bert()
    with refused(model, ModelStateError, "no gates, alphas, removed heads or neurons", "nothing to fold"):
        fold_heads(model)
    swap_to_gated(model)
    fold_heads(model)
    with refused(model, ModelStateError, "nothing to fold"):
        fold_heads(model)


def test_a_folded_model_can_be_changed_again():
    model, inputs = changed(FAMILIES["t5"], state="both"), FAMILIES["t5"].inputs()
    fold_heads(model)
    expected = output(model, inputs)
    swap_to_gated(model)
    swap_to_collaborative(model)
    torch.testing.assert_close(output(model, inputs), expected, rtol=0, atol=EXACT64)
