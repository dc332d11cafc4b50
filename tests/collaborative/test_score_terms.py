"""A restricted score is one of its two terms, computed by hand, and stays so in training."""

import pytest
import torch
from model_runs import output, set_backend, sites, swap
from model_sizes import EXACT64, HEADS, KINDS
from transformers import GPTNeoConfig, GPTNeoModel
from unchanged import assert_unchanged, refused, snapshot

from collab_heads import get_adapter
from collab_heads.collaborative.score_terms import restrict_scores
from collab_heads.errors import ArgumentError, UnsupportedModelError
from families import FAMILIES

TERMS = ("content", "context")
MAPS = {"enc-self": "encoder_attentions", "dec-self": "decoder_attentions", "dec-enc": "cross_attentions"}
STATES = ("hidden_states", "encoder_hidden_states", "key_value_states")


def build(name, kind=None, dim=None):
    """A model in float64 with the eager backend, swapped if a kind is given."""
    model = FAMILIES[name].build().double()
    set_backend(model, "eager")
    if kind:
        swap(model, kind, dim)
    return model


def watch(model, inputs):
    """One forward pass: path -> (what queries and keys are made of, the attention mask), and all attention maps."""
    seen = {}

    def hook(path):
        def note(module, args, kwargs):
            named = {**dict(zip(["hidden_states"], args, strict=False)), **kwargs}
            found = [named[name] for name in STATES if named.get(name) is not None]
            seen[path] = found[0], found[-1], named["attention_mask"]

        return note

    handles = [m.register_forward_pre_hook(hook(path), with_kwargs=True) for path, m in sites(model).items()]
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True)
    for handle in handles:
        handle.remove()
    return seen, outputs


@torch.no_grad()
def by_hand(terms, weights, queries, keys, mask):
    """Attention [B, H, T, S] from one term of the score; the key's bias is left out, as the softmax cancels it."""
    key = torch.einsum("hdj,bsj->bhsd", weights.key, keys)
    if terms == "content":
        scores = torch.einsum("hd,bhsd->bhs", weights.query_bias, key)[:, :, None]
    else:
        scores = torch.einsum("hdi,bti,bhsd->bhts", weights.query, queries, key)
    scores = weights.scale * scores.expand(-1, -1, queries.shape[1], -1)
    return (scores if mask is None else scores + mask).softmax(-1)


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("kind", (None, *KINDS))
@pytest.mark.parametrize("name", ("bert", "marian"))
def test_the_score_is_that_term_alone(name, kind, terms):
    """Swapped without loss, the reference is the same: the weights of the stock model."""
    stock, model, inputs = build(name), build(name, kind), FAMILIES[name].inputs()
    adapter = get_adapter(stock)
    assert restrict_scores(model, terms) == FAMILIES[name].num_sites
    seen, outputs = watch(model, inputs)
    for site in adapter.sites(stock):
        maps = MAPS[site.role] if name == "marian" else "attentions"
        weights = adapter.read(sites(stock)[site.path])
        expected = by_hand(terms, weights, *seen[site.path])
        torch.testing.assert_close(outputs[maps][site.layer], expected, rtol=0, atol=EXACT64, msg=site.path)
        other = by_hand(*set(TERMS).difference([terms]), weights, *seen[site.path])
        assert (other - expected).abs().max() > 0.05
        if terms == "content" and site.role != "dec-self":  # alike for all queries, unless a mask is causal
            torch.testing.assert_close(expected, expected[:, :, :1].expand_as(expected), rtol=0, atol=EXACT64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name, terms", [(name, terms) for name in ("bert", "marian") for terms in TERMS] + [("t5", "context")]
)
def test_a_lossless_swap_changes_nothing_that_is_restricted(name, terms, kind):
    stock, swapped, inputs = build(name), build(name, kind), FAMILIES[name].inputs()
    whole = output(stock, inputs)
    for model in (stock, swapped):
        assert restrict_scores(model, terms) == FAMILIES[name].num_sites
    torch.testing.assert_close(output(swapped, inputs), output(stock, inputs), rtol=0, atol=EXACT64)
    # T5's score has no other term to lose
    assert ((output(stock, inputs) - whole).abs().max() > 1e-2) == FAMILIES[name].biased


@pytest.mark.parametrize("name", ("bert", "marian"))
def test_the_shared_content_term_is_exact_at_any_width(name):
    stock, swapped, inputs = build(name), build(name, "shared", 8), FAMILIES[name].inputs()
    for model in (stock, swapped):
        restrict_scores(model, "content")
    torch.testing.assert_close(output(swapped, inputs), output(stock, inputs), rtol=0, atol=EXACT64)


def test_sites_that_are_swapped_and_sites_that_are_not_are_restricted_alike():
    stock, mixed, inputs = build("marian"), build("marian"), FAMILIES["marian"].inputs()
    swap(mixed, "shared", sites="dec-enc")
    for model in (stock, mixed):
        restrict_scores(model, "content")
    torch.testing.assert_close(output(mixed, inputs), output(stock, inputs), rtol=0, atol=EXACT64)


ENDS = {  # (kind, terms) -> how the names of the parameters end that become zero
    (None, "content"): "query.weight",
    (None, "context"): "query.bias",
    ("shared", "content"): "query_key.mixing",
    ("shared", "context"): "query_key.content_bias.weight",
    ("per_head", "content"): "query_key.shared_query.weight",
    ("per_head", "context"): "query_key.shared_query.bias",
}


@pytest.mark.parametrize("kind, terms", ENDS)
def test_the_dropped_term_gets_no_gradient_and_stays_zero(kind, terms):
    model = build("bert", kind).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    restrict_scores(model, terms)
    dropped = {name: p for name, p in model.named_parameters() if name.endswith(ENDS[kind, terms])}
    other = ENDS[kind, TERMS[1 - TERMS.index(terms)]]
    kept = {name: p for name, p in model.named_parameters() if name.endswith(other)}
    assert len(dropped) == len(kept) == 2
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name not in dropped)
        assert torch.equal(parameter, before[name]) == (name not in dropped)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    model(**FAMILIES["bert"].inputs(), labels=torch.tensor([0, 1, 0])).loss.backward()
    assert all(parameter.grad is None for parameter in dropped.values())
    assert all(parameter.grad.abs().max() > 1e-6 for parameter in kept.values())
    optimizer.step()
    assert all((parameter == 0).all() for parameter in dropped.values())
    assert all(not torch.equal(parameter, before[name]) for name, parameter in kept.items())


def test_restricting_twice_is_restricting_once():
    model, inputs = build("bert", "shared"), FAMILIES["bert"].inputs()
    restrict_scores(model, "content")
    before, expected = snapshot(model), output(model, inputs)
    restrict_scores(model, "content")
    assert_unchanged(model, before)
    assert torch.equal(output(model, inputs), expected)


@pytest.mark.parametrize("kind", (None, *KINDS))
def test_a_model_without_query_biases_has_no_content_term_and_keeps_its_context(kind):
    model = build("t5", kind)
    with refused(model, UnsupportedModelError, "encoder.block.0.layer.0.SelfAttention has no query bias"):
        restrict_scores(model, "content")
    before = snapshot(model)
    assert restrict_scores(model, "context") == 6
    assert_unchanged(model, before)


def test_one_site_without_a_query_bias_leaves_the_others_alone():
    model = build("bert")
    last = list(sites(model))[-1]
    sites(model)[last].query.bias = None
    with refused(model, UnsupportedModelError, f"{last} has no query bias"):
        restrict_scores(model, "content")


@pytest.mark.parametrize("kind", (None, "shared"))
def test_unknown_terms_and_models_are_refused(kind):
    model = build("bert", kind)
    for terms in ("contents", "both", None):
        with refused(model, ArgumentError, "unknown terms", repr(terms), "content, context"):
            restrict_scores(model, terms)
    config = GPTNeoConfig(vocab_size=9, hidden_size=8, num_layers=1, num_heads=HEADS, attention_types=[[["global"], 1]])
    other = GPTNeoModel(config)
    with refused(other, UnsupportedModelError, "'gpt_neo'"):
        restrict_scores(other, "content")
