"""The benchmark of language models, tried on tiny ones: what it counts, and its peer."""

import importlib
import math

import pytest
import torch
from model_sizes import FP32_NOISE
from pages import ROOT
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

VOCABULARY, HEADS, GROUPS, STD = 40, 4, 2, 0.3
SIZES = {"vocab_size": VOCABULARY, "initializer_range": STD}


@pytest.fixture
def programs(monkeypatch):
    """The program and its peer."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("lm"), importlib.import_module("lm_peer")


def gpt2():
    torch.manual_seed(0)
    sizes = GPT2Config(n_layer=2, n_head=HEADS, n_embd=32, n_positions=32, **SIZES)
    return GPT2LMHeadModel(sizes).eval()


def qwen3():
    torch.manual_seed(0)
    inner = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(num_attention_heads=8, num_key_value_heads=HEADS, **inner, **SIZES)).eval()


@torch.no_grad()
def make_alike(model):
    """Let the key/value heads of a group be the same, so that their mean is each of them."""
    for layer in model.base_model.h if model.config.model_type == "gpt2" else model.base_model.layers:
        if model.config.model_type == "gpt2":
            tensors = [
                part for p in (layer.attn.c_attn.weight.T, layer.attn.c_attn.bias) for part in (p[32:64], p[64:])
            ]
        else:
            tensors = [layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight]
        for tensor in tensors:
            heads = tensor.unflatten(0, (GROUPS, HEADS // GROUPS, -1))
            heads.copy_(heads[:, :1].clone().expand_as(heads))


def batch():
    ids = torch.randint(3, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits(model):
    with torch.no_grad():
        return model(**batch()).logits


@pytest.mark.parametrize("build", (gpt2, qwen3))
def test_pooling_heads_that_are_alike_loses_nothing(build, programs):
    _, peer = programs
    model = build()
    different = (logits(peer.mean_pooled(model, GROUPS)) - logits(model)).abs().max()
    assert different > 0.01
    make_alike(model)
    assert_close(logits(peer.mean_pooled(model, GROUPS)), logits(model), atol=FP32_NOISE, rtol=FP32_NOISE)


@pytest.mark.parametrize("build", (gpt2, qwen3))
def test_the_peer_learns_and_nothing_else_of_it_moves(build, programs):
    _, peer = programs
    original = build()
    model = peer.mean_pooled(original, GROUPS)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gap = (logits(model) - logits(original)).norm()
    peer.distil(model, original, [batch()] * 8, steps=30, seed=0)
    assert (logits(model) - logits(original)).norm() < 0.9 * gap
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all("attn" in name for name in moved)


def test_perplexity_counts_what_is_no_padding(programs):
    lm, _ = programs
    model, inputs = gpt2(), batch()
    ids, lengths = inputs["input_ids"], inputs["attention_mask"].sum(1)
    alone = [model(input_ids=row[None, :n], labels=row[None, :n]).loss for row, n in zip(ids, lengths, strict=True)]
    total = sum(float(loss) * int(n - 1) for loss, n in zip(alone, lengths, strict=True))
    expected = math.exp(total / int((lengths - 1).sum()))
    assert lm.perplexity(model, [inputs]) == pytest.approx(expected, rel=FP32_NOISE)


def test_cache_and_parameters_are_counted(programs):
    lm, peer = programs
    model = qwen3()
    fewer = peer.mean_pooled(model, GROUPS)
    assert lm.cache_bytes(model) == 2 * 2 * HEADS * 8 * 4  # layers, keys and values, heads, width, bytes
    assert lm.cache_bytes(fewer) == lm.cache_bytes(model) * GROUPS / HEADS
    query, key, norms = 64 * 32, HEADS * 8 * 32, 2 * 8
    assert lm.attention_parameters(model) == 2 * (2 * query + 2 * key + norms)


def test_rows_of_several_draws(programs):
    lm, _ = programs
    row = {"model": "gpt2", "method": "stock", "distilled": 0, "val": 20.0, "elsewhere": 400.0, "note": None}
    rows = [row, *({**row, "method": "compress", "draw": n, "val": 21.0 + n, "elsewhere": 404.0} for n in (0, 1))]
    stock, ours = lm.over_draws(rows)
    assert "more" not in stock and ours["draws"] == 2 and ours["more"] == pytest.approx(7.5)
    assert "more elsewhere" not in stock and ours["more elsewhere"] == pytest.approx(1.0)
