"""Broken versions of gates and removal that the head contract must catch: each is put in place and seen to fail."""

import pytest
import test_head_contract as contract
import torch
import torch.nn.functional as F
from changed_heads import changed, output_projections

from collab_heads.adapters import mpnet, t5
from collab_heads.contract import adapter
from collab_heads.heads import fold
from collab_heads.layers import gates, output, removed, shared_query_key
from collab_heads.layers.layout import become, weight_of, widths
from collab_heads.model import apply_state
from collab_heads.model.open_layers import OpenSite
from families import FAMILIES, LAYOUTS

BIASED = [name for name in LAYOUTS if FAMILIES[name].biased]
T5 = [name for name in LAYOUTS if name.startswith("t5")]


def closed_heads_leak(monkeypatch):
    """The rule of evaluation is off: a closed gate passes its stretched value, as many implementations do."""
    monkeypatch.setattr(gates.HeadGates, "values", lambda self: self.stretched(torch.sigmoid(self.log_alpha.float())))


def gates_off_in_evaluation(monkeypatch):
    stock = output.HeadOutputProjection.forward

    def forward(self, concatenated):
        return stock(self, concatenated) if self.training else F.linear(concatenated, weight_of(self), self.bias)

    monkeypatch.setattr(output.HeadOutputProjection, "forward", forward)


def partial_gates_lost(monkeypatch):
    """Removal and folding forget what open gates multiply with."""

    def remove_gates(projection):
        del projection.gates, projection.mixing
        become(projection, projection.stock)

    monkeypatch.setattr(apply_state, "remove_gates", remove_gates)
    monkeypatch.setattr(fold, "fold_output", remove_gates)


def wrong_columns_of_the_output(monkeypatch):
    stock = output.keep_output_heads

    def keep_output_heads(projection, kept, num_heads):
        stock(projection, [(head + 1) % num_heads for head in kept], num_heads)

    monkeypatch.setattr(apply_state, "keep_output_heads", keep_output_heads)


def wrong_rows_of_the_value(monkeypatch):
    """Rows in steps of H instead of blocks of d_v."""

    @torch.no_grad()
    def keep_rows(linear, kept, num_heads):
        width = widths(linear)[1] // num_heads
        removed.keep_rows(linear, kept, num_heads)
        if len(kept) > 1:
            weight = weight_of(linear)
            weight.copy_(weight.unflatten(0, (len(kept), width)).transpose(0, 1).flatten(0, 1))

    monkeypatch.setattr(adapter, "keep_rows", keep_rows)


def wrong_rows_of_the_mixing(monkeypatch):
    stock = shared_query_key.SharedQueryKey.keep_heads

    def keep_heads(self, kept):
        rows = self.mixing.data[: len(kept)].clone()
        stock(self, kept)
        if rows.shape == self.mixing.shape:
            self.mixing.data = rows

    monkeypatch.setattr(shared_query_key.SharedQueryKey, "keep_heads", keep_heads)


def wrong_rows_of_the_content_bias(monkeypatch):
    stock = shared_query_key.SharedQueryKey.keep_heads

    def keep_heads(self, kept):
        rows = self.content_bias.weight.data[: len(kept)].clone()
        stock(self, kept)
        self.content_bias.weight.data = rows

    monkeypatch.setattr(shared_query_key.SharedQueryKey, "keep_heads", keep_heads)


def first_columns_of_the_position_bias(monkeypatch):
    def kept_columns(module, bias):
        kept = getattr(module, "kept_heads", None)
        return bias[:, : len(kept)] if kept and bias is not None else bias

    for family in (t5, mpnet):
        monkeypatch.setattr(family, "kept_columns", kept_columns)


def kept_columns_are_handed_on(monkeypatch):
    """The position bias is cut for later layers, too."""

    def forward(self, *args, **kwargs):
        result, bias, weights = t5.shrunk_attention(self, *args, **kwargs)
        return result, t5.kept_columns(self, bias).repeat(1, 4, 1, 1)[:, :4], weights

    monkeypatch.setattr(t5.ShrunkT5Attention, "forward", forward)


def bias_of_the_empty_site_lost(monkeypatch):
    monkeypatch.setattr(
        output.ConstantOutput, "forward", lambda self, heads: heads.new_zeros(*heads.shape[:-1], self.out_features)
    )


PRUNED = [  # mutation, families, the query/key projection that it needs, whether sites lose all heads
    (closed_heads_leak, LAYOUTS, None, False),
    (gates_off_in_evaluation, LAYOUTS, None, False),
    (partial_gates_lost, LAYOUTS, None, False),
    (wrong_columns_of_the_output, LAYOUTS, None, False),
    (wrong_rows_of_the_value, LAYOUTS, None, False),
    (wrong_rows_of_the_value, LAYOUTS, "shared", False),
    (wrong_rows_of_the_mixing, LAYOUTS, "shared", False),
    (wrong_rows_of_the_content_bias, BIASED, "shared", False),
    (first_columns_of_the_position_bias, (*T5, "mpnet"), None, False),
    (first_columns_of_the_position_bias, (*T5, "mpnet"), "shared", False),
    (kept_columns_are_handed_on, T5, None, False),
    (bias_of_the_empty_site_lost, BIASED, None, True),
]


@pytest.mark.parametrize(
    "mutation, name, origin, empty", [(m, name, *rest) for m, names, *rest in PRUNED for name in names]
)
def test_the_contract_catches(mutation, name, origin, empty, monkeypatch):
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        contract.assert_pruned_equals_gated(FAMILIES[name], origin, empty)


def zeros_in_the_wrong_columns(monkeypatch):
    stock = fold.restore_output

    def restore_output(projection, state, *args):
        stock(projection, state, *args)
        weight_of(projection).data.copy_(weight_of(projection).data.roll(8, dims=-1))

    monkeypatch.setattr(fold, "restore_output", restore_output)


@pytest.mark.parametrize("mutation", (partial_gates_lost, zeros_in_the_wrong_columns))
@pytest.mark.parametrize("name", LAYOUTS)
def test_folding_is_checked(mutation, name, monkeypatch):
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        contract.assert_folded_equals(FAMILIES[name], "both", empty=True)


def no_dummy_token(monkeypatch):
    """A site without heads caches nothing: its layer, the first, counts no tokens."""
    monkeypatch.setattr(removed.NoHeads, "keys", lambda self, states: states.new_zeros(*states.shape[:-1], 0))
    monkeypatch.setattr(removed.NoHeads, "cache_width", 0)


@pytest.mark.parametrize("name", ("marian", "t5"))
def test_a_missing_dummy_token_is_caught(name, monkeypatch):
    no_dummy_token(monkeypatch)
    with pytest.raises(AssertionError):
        contract.test_stepwise_logits(FAMILIES[name], None, True)


@pytest.mark.parametrize("name", ("bert-decoder", "marian-decoder"))
def test_a_missing_dummy_token_is_caught_in_a_lone_decoder(name, monkeypatch):
    no_dummy_token(monkeypatch)
    with pytest.raises(AssertionError):
        contract.test_decoder_cache(name, True)


def one_number_for_every_head(monkeypatch):
    """Heads are numbered as they are now, not as they were."""
    monkeypatch.setattr(OpenSite, "head_numbers", property(lambda site: tuple(range(site.num_heads))))


@pytest.mark.parametrize("name", LAYOUTS)
def test_renumbered_heads_are_caught(name, monkeypatch):
    one_number_for_every_head(monkeypatch)
    with pytest.raises(AssertionError):
        contract.test_pruning_twice_equals_once(name, None)


def test_gates_that_cannot_learn_are_caught(monkeypatch):
    """Gates cut off from the graph learn nothing."""
    monkeypatch.setattr(gates.HeadGates, "sample", lambda self: self.values().detach())
    with pytest.raises(AssertionError):
        contract.test_gradients("bert", None)


def test_the_mutations_change_gated_models_at_all():
    """Every site of the models above has closed heads, and open gates that are not 1."""
    for name in LAYOUTS:
        for projection in output_projections(changed(FAMILIES[name], state="gated", empty=False)).values():
            values = projection.gates.values()
            assert (values == 0).any()
            assert (values > 0).any()
