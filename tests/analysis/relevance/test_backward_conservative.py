"""Relevance is conserved: at every cut through a model it adds up to what is explained. And nothing else changes."""

import itertools

import pytest
import torch
from heads_by_hand import CHANGES, model_in
from model_configs import bert_config, marian_config, t5_config
from model_inputs import batch
from model_runs import set_backend
from model_sizes import EXACT64, FP32_NOISE
from relevance_by_hand import begin_relevance, decoder_batch, full, missing, without_biases
from torch import nn
from transformers import (
    BartForSequenceClassification,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    T5ForSequenceClassification,
)
from unchanged import assert_unchanged, refused, snapshot

from collab_heads import get_adapter, prune_heads
from collab_heads.adapters.gemma3 import Gemma3Adapter
from collab_heads.adapters.llama import LlamaAdapter
from collab_heads.adapters.qwen3 import Qwen3Adapter
from collab_heads.adapters.t5 import T5Adapter
from collab_heads.analysis.relevance import backward as rules
from collab_heads.analysis.relevance.backward import Gate, conservative, explaining
from collab_heads.errors import UnsupportedModelError
from families import FAMILIES, LAYOUTS, make

CONSERVED = 1e-8  # in float64, of logits between 1 and 1e3; seen: 4e-12
BROKEN = 1e-3  # what a broken rule misses at least


def switch_off(broken, monkeypatch):
    """Switch one rule off."""
    if broken == "attention":
        monkeypatch.setattr(rules, "score_projections", lambda *_: [])
    elif broken == "norms and activations":
        monkeypatch.setattr(rules, "by_ratio", lambda module, x, y: y)
        monkeypatch.setattr(rules, "FUNCTIONS", frozenset())  # most activation modules call one
    elif broken == "LayerNorm":
        monkeypatch.setattr(rules, "layer_norm", lambda module, x, y: y)
    elif broken == "gated":
        for adapter in (Gemma3Adapter, LlamaAdapter, Qwen3Adapter, T5Adapter):
            monkeypatch.setattr(adapter, "gated", {})
    elif broken == "functions":
        monkeypatch.setattr(rules, "FUNCTIONS", frozenset())
    elif broken == "weights":
        monkeypatch.setattr(rules, "WEIGHTS", frozenset())


@pytest.mark.parametrize("name", ("t5", "mt5", "marian", "bert", "mpnet", "opt-350m", "gpt2"))
def test_heads_and_residual_are_the_logit_in_every_layer(name):
    """T5 has ReLU and RMS norms, mT5 gated GELU, Marian (SiLU or GELU) and others LayerNorms: no biases anywhere."""
    model, inputs = without_biases(FAMILIES[name].build()), full(decoder_batch(name))
    found = missing(name, model, inputs)
    assert found.keys() == {site.path for site in get_adapter(model).sites(model)}
    assert max(found.values()) < CONSERVED, found


@pytest.mark.parametrize(
    "name, broken",
    [
        *itertools.product(("marian", "bert", "gpt2"), ("attention", "LayerNorm", "norms and activations")),
        *itertools.product(("t5", "mt5"), ("norms and activations",)),
        ("t5", "attention"),
        ("mt5", "gated"),
    ],
)
def test_without_a_rule_it_is_not(name, broken, monkeypatch):
    model, inputs = without_biases(FAMILIES[name].build()), full(decoder_batch(name))
    switch_off(broken, monkeypatch)
    assert max(missing(name, model, inputs).values()) > BROKEN


# Llama and Qwen3: rotary positions, RMS norms, gated SiLU, keys that heads share; Gemma 3: four norms a layer,
# (1 + weight), gated GELU; OPT and BioGPT: LayerNorms before attention
DECODERS = ("llama", "qwen3", "gemma3", "opt", "biogpt")


@pytest.mark.parametrize("name", (*DECODERS, "unequal groups"))
def test_decoders_conserve_at_every_cut(name):
    """Stock RMS norms, rotations and eager softmaxes round to float32; what they gave is what is explained."""
    model = without_biases(FAMILIES["qwen3" if name == "unequal groups" else name].build())
    if name == "unequal groups":
        prune_heads(model, heads={"dec-self": [[1], [0, 3]]})
        name = "qwen3"
    found = missing(name, model, full(decoder_batch(name)))
    assert found.keys() == {site.path for site in get_adapter(model).sites(model)}
    assert max(found.values()) < CONSERVED, found


@pytest.mark.parametrize(
    "name, broken",
    [(name, "attention") for name in DECODERS]
    + [(name, "norms and activations") for name in ("llama", "qwen3")]
    + [(name, "gated") for name in ("llama", "gemma3")]
    + [("opt", "LayerNorm")],
)
def test_decoders_without_a_rule_do_not(name, broken, monkeypatch):
    switch_off(broken, monkeypatch)
    model = without_biases(FAMILIES[name].build())
    assert max(missing(name, model, full(decoder_batch(name))).values()) > BROKEN


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_conserves_what_enters_it(name):
    model = without_biases(FAMILIES[name].build())
    relevance, total = begin_relevance(model, full(decoder_batch(name)))
    assert abs(total) > 1e-3
    assert abs(relevance - total) < CONSERVED


HEADS = {
    "roberta-lm": lambda: make(RobertaForMaskedLM, bert_config(type(FAMILIES["roberta"].build().config))),
    "bart": lambda: make(
        BartForSequenceClassification, marian_config(type(FAMILIES["bart"].build().config), num_labels=3)
    ),
    "t5": lambda: make(T5ForSequenceClassification, t5_config(num_labels=3)),
    "roberta": FAMILIES["roberta"].build,
    "esm": FAMILIES["esm"].build,
}


@pytest.mark.parametrize("name, rule", [(name, "weights" if name == "esm" else "functions") for name in HEADS])
def test_activations_that_are_functions_have_the_rule(name, rule, monkeypatch):
    """tanh and GELU of classification and language modelling heads; ESM writes its GELU out."""
    model, inputs = without_biases(HEADS[name]()), full(batch())
    inputs["input_ids"][:, -1] = 2  # these classifiers read the end of the sentence
    inputs["input_ids"][:, :-1].clamp_(min=3)
    relevance, total = begin_relevance(model, inputs)
    assert abs(relevance - total) < CONSERVED
    switch_off(rule, monkeypatch)
    relevance, total = begin_relevance(model, inputs)
    assert abs(relevance - total) > BROKEN


@pytest.mark.parametrize(
    "name, change",
    [("bert", change) for change in CHANGES if change != "stock"]
    + [("t5", "gated"), ("t5", "pruned"), ("gpt2", "pruned")],
)
def test_changed_models_conserve(name, change):
    model = without_biases(model_in(name, change))
    relevance, total = begin_relevance(model, full(decoder_batch(name)))
    assert abs(relevance - total) < CONSERVED


@pytest.mark.parametrize("name, backend", [(n, "sdpa") for n in FAMILIES] + [(n, "eager") for n in LAYOUTS])
def test_outputs_are_bit_equal(name, backend):
    model, inputs = FAMILIES[name].build(), FAMILIES[name].inputs()
    set_backend(model, backend)
    before = snapshot(model)
    with explaining(model):
        expected = model(**inputs)[0]
        with conservative(model):
            found = model(**inputs)[0]
    assert torch.equal(found, expected)
    assert_unchanged(model, before)


def test_the_rules_by_hand():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    out = torch.randn(5, 8, dtype=torch.float64, generator=generator)
    norm = nn.LayerNorm(8, eps=0.1).double()
    nn.init.normal_(norm.weight, generator=generator)
    scale = (x.var(-1, correction=0, keepdim=True) + 0.1).rsqrt().detach()
    linear = (x - x.mean(-1, keepdim=True)) * scale * norm.weight + norm.bias
    for found, expected in (
        (rules.layer_norm(norm, x, norm(x)), linear),
        (rules.by_ratio(None, x, torch.tanh(x)), x * (torch.tanh(x) / x).detach()),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=EXACT64)
        gradients = [torch.autograd.grad(each, x, out, retain_graph=True)[0] for each in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=0, atol=EXACT64)
    plain = nn.LayerNorm((5, 8), elementwise_affine=False)
    expected = (x - x.mean()) * (x.var(correction=0) + plain.eps).rsqrt().detach()
    gradients = [torch.autograd.grad(each, x, out)[0] for each in (rules.layer_norm(plain, x, plain(x)), expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=EXACT64)


def test_nothing_passes_where_an_activation_gets_zero():
    x = torch.tensor([0.0, 1e-40, -2.0], requires_grad=True)
    Gate.apply(x, torch.tanh(x).detach()).sum().backward()
    assert x.grad[0] == 0
    torch.testing.assert_close(x.grad[1:], torch.tensor([1.0, 0.4820138]), rtol=0, atol=FP32_NOISE)


def test_the_model_is_restored_after_an_error():
    model, inputs = FAMILIES["marian"].build().train(), decoder_batch("marian")
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="stop"), conservative(model):
        model(**inputs)
        raise RuntimeError("stop")
    assert_unchanged(model, before)
    with pytest.raises(RuntimeError, match="stop"), explaining(model):
        assert not any(p.requires_grad for p in model.parameters()) and not model.training
        raise RuntimeError("stop")
    assert_unchanged(model, before)
    x = torch.ones(2, requires_grad=True)
    assert type(torch.tanh(x).grad_fn).__name__ == "TanhBackward0"


def test_wrapped_models_are_refused():
    model = FAMILIES["bert"].build()
    with refused(model, UnsupportedModelError, "DataParallel"), conservative(nn.DataParallel(model)):
        pass


def test_a_norm_without_a_rule_is_refused(monkeypatch):
    model = T5ForConditionalGeneration(T5Config(**t5_config().to_diff_dict())).eval()
    monkeypatch.setattr(T5Adapter, "rms_norms", ())
    with (
        refused(
            model, UnsupportedModelError, "encoder.block.0.layer.0.layer_norm is a T5LayerNorm", "rms_norms of T5A"
        ),
        conservative(model),
    ):
        pass
