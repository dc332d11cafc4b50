"""Broken versions of the core that the contract must catch: each is put in place and the contract seen to fail."""

import sys

import pytest
import test_continuation_contract
import torch
from transformers import EsmModel

import test_contract
from collab_heads.adapters import albert, gpt2, marian, mpnet, t5
from collab_heads.collaborative import plan
from collab_heads.fitting import kinds
from collab_heads.layers import attention
from families import FAMILIES, each

ADAPTERS = [module for name, module in sys.modules.items() if name.startswith("collab_heads.adapters.")]


def wrong_scale(monkeypatch):
    """The source system's scale, 1 / sqrt(R / H), on a model whose scale is another."""
    stock = plan.QueryKeyState
    monkeypatch.setattr(
        plan, "QueryKeyState", lambda kind, dim, head, scale, *more: stock(kind, dim, head, scale * 0.9, *more)
    )


def dropped_query_bias(monkeypatch):
    monkeypatch.setattr(kinds, "content_bias", lambda bias, key: torch.zeros(key.shape[0], key.shape[2]).double())


def transposed_mixing(monkeypatch):
    stock = kinds.SharedFit.projection

    @torch.no_grad()
    def projection(*args):
        query_key = stock(*args)
        heads, dim = query_key.mixing.shape
        query_key.mixing.copy_(query_key.mixing.clone().reshape(dim, heads).T)
        return query_key

    monkeypatch.setattr(kinds.SharedFit, "projection", projection)


def no_position_bias(monkeypatch):
    for family in (t5, mpnet):
        monkeypatch.setattr(family, "attend", lambda *args, position_bias, **kwargs: attention.attend(*args, **kwargs))


def replace_attend(monkeypatch, attend):
    for module in ADAPTERS:
        monkeypatch.setattr(module, "attend", attend, raising=False)


def padding_attended(monkeypatch):
    def attend(module, states, key, value, mask, **kwargs):
        return attention.attend(module, states, key, value, None, **kwargs)

    replace_attend(monkeypatch, attend)


def no_attention_dropout(monkeypatch):
    replace_attend(monkeypatch, lambda *args, dropout, **kwargs: attention.attend(*args, dropout=0.0, **kwargs))


def no_output_dropout(monkeypatch):
    """What the source system lost in ALBERT."""

    def forward(self, *args, **kwargs):
        self.output_dropout.p = 0.0
        return stock(self, *args, **kwargs)

    stock = albert.CollaborativeAlbertAttention.forward
    monkeypatch.setattr(albert.CollaborativeAlbertAttention, "forward", forward)


def no_residual_dropout(monkeypatch):
    """GPT-2's attention module ends with it."""

    def forward(self, *args, **kwargs):
        self.resid_dropout.p = 0.0
        return stock(self, *args, **kwargs)

    stock = gpt2.CollaborativeGPT2Attention.forward
    monkeypatch.setattr(gpt2.CollaborativeGPT2Attention, "forward", forward)


def default_epsilon(monkeypatch):
    """What the source system lost in ALBERT, too."""

    def forward(self, *args, **kwargs):
        self.LayerNorm.eps = 1e-5
        return stock(self, *args, **kwargs)

    stock = albert.CollaborativeAlbertAttention.forward
    monkeypatch.setattr(albert.CollaborativeAlbertAttention, "forward", forward)


SHARING = [name for name, family in FAMILIES.items() if family.shares]  # the others: `test_rotary`
MUTATIONS = {
    wrong_scale: FAMILIES,
    dropped_query_bias: [name for name in SHARING if FAMILIES[name].biased],
    transposed_mixing: SHARING,
    no_position_bias: ("t5", "t5-encoder", "mt5", "mt5-encoder", "mpnet"),
    padding_attended: [name for name in SHARING if FAMILIES[name].padded],
    default_epsilon: ("albert", "albert-groups"),
}


@pytest.mark.parametrize("backend", ("eager", "sdpa"))
@pytest.mark.parametrize(
    "mutation, name", each((m, name) for m, names in MUTATIONS.items() for name in names if name in FAMILIES)
)
def test_the_contract_catches(mutation, name, backend, monkeypatch):
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        test_contract.assert_lossless(FAMILIES[name], "shared", backend)


def test_padding_attended_is_caught_when_narrow(padded_family, monkeypatch):
    if not padded_family.shares:
        pytest.skip("another core: see test_rotary")
    if padded_family.base is EsmModel:
        pytest.skip("its padding is zero before attention, whatever it holds")
    if "input_values" in padded_family.inputs():
        pytest.skip("these models make zeros of padding before they attend: only a lossless swap can show it")
    padding_attended(monkeypatch)
    with pytest.raises(AssertionError):
        test_contract.test_padding_is_ignored(padded_family, "per_head")


LOST_DROPOUT = [(no_attention_dropout, name) for name in SHARING] + [(no_output_dropout, "albert-groups")]
LOST_DROPOUT += [(no_residual_dropout, "gpt2-decoder")]


@pytest.mark.parametrize("mutation, name", each(LOST_DROPOUT))
def test_a_lost_dropout_is_caught(mutation, name, monkeypatch):
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        test_contract.test_training_is_the_stock_one(FAMILIES[name], "shared")


def forgetful(module, value, states, past_key_values, *, is_cross):
    """A cache that hands back keys in another order still decodes: stepwise logits must show it."""
    key, packed = attention.cached_key_value(module, value, states, past_key_values, is_cross=is_cross)
    return (key, packed) if is_cross or past_key_values is None else (key.flip(2), packed)


def test_a_cache_that_forgets_is_caught(monkeypatch):
    monkeypatch.setattr(marian, "cached_key_value", forgetful)
    with pytest.raises(AssertionError):
        test_contract.test_stepwise_logits(FAMILIES["marian"], "shared")


def test_a_cache_that_forgets_is_caught_in_a_lone_decoder(monkeypatch):
    monkeypatch.setattr(gpt2, "cached_key_value", forgetful)
    with pytest.raises(AssertionError):
        test_continuation_contract.test_caches("gpt2", "shared+values")
