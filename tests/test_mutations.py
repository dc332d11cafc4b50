"""Broken versions of the core that the contract must catch: each is put in place and the contract seen to fail."""

import pytest
import torch

import test_contract
from collab_heads.collaborative import attention, fit, query_key, swap
from families import FAMILIES


def wrong_scale(monkeypatch):
    """The source system's scale, 1 / sqrt(R / H), on a model whose scale is another."""
    stock = query_key.QueryKeyState
    monkeypatch.setattr(
        swap, "QueryKeyState", lambda kind, dim, head, scale, bias: stock(kind, dim, head, scale * 0.9, bias)
    )


def dropped_query_bias(monkeypatch):
    monkeypatch.setattr(fit, "content_bias", lambda bias, key: torch.zeros(key.shape[0], key.shape[2]).double())


def transposed_mixing(monkeypatch):
    stock = swap.new_query_key

    @torch.no_grad()
    def new_query_key(*args):
        query_key = stock(*args)
        heads, dim = query_key.mixing.shape
        query_key.mixing.copy_(query_key.mixing.clone().reshape(dim, heads).T)
        return query_key

    monkeypatch.setattr(swap, "new_query_key", new_query_key)


def no_position_bias(monkeypatch):
    from collab_heads.adapters import t5

    monkeypatch.setattr(t5, "attend", lambda *args, position_bias, **kwargs: attention.attend(*args, **kwargs))


def padding_attended(monkeypatch):
    for name in ("bert", "marian", "t5"):
        adapter = getattr(__import__("collab_heads").adapters, name)

        def attend(module, states, key, value, mask, **kwargs):
            return attention.attend(module, states, key, value, None, **kwargs)

        monkeypatch.setattr(adapter, "attend", attend)


MUTATIONS = {
    wrong_scale: ("bert", "bert-decoder", "marian", "t5", "t5-encoder"),
    dropped_query_bias: ("bert", "bert-decoder", "marian", "marian-decoder"),
    transposed_mixing: ("bert", "marian", "t5"),
    no_position_bias: ("t5", "t5-encoder"),
    padding_attended: ("bert", "bert-decoder", "marian", "t5", "t5-encoder"),
}


@pytest.mark.parametrize("backend", ("eager", "sdpa"))
@pytest.mark.parametrize("mutation, name", [(m, name) for m, names in MUTATIONS.items() for name in names])
def test_the_contract_catches(mutation, name, backend, monkeypatch):
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        test_contract.assert_lossless(FAMILIES[name], "shared", backend)


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_attended_is_caught_when_narrow(name, monkeypatch):
    padding_attended(monkeypatch)
    with pytest.raises(AssertionError):
        test_contract.test_padding_is_ignored(FAMILIES[name], "per_head")


def test_a_cache_that_forgets_is_caught(monkeypatch):
    """A cache that keeps only the last token's key still decodes: stepwise logits must show it."""
    from collab_heads.adapters import marian

    def cached_key_value(module, value, states, past_key_values, *, is_cross):
        key, packed = attention.cached_key_value(module, value, states, past_key_values, is_cross=is_cross)
        return (key, packed) if is_cross or past_key_values is None else (key.flip(2), packed)

    monkeypatch.setattr(marian, "cached_key_value", cached_key_value)
    with pytest.raises(AssertionError):
        test_contract.test_stepwise_logits(FAMILIES["marian"], "shared")
