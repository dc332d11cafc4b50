"""What only narrower heads with rotary positions can get wrong: the pairs they keep, and where those are turned to."""

import copy
import itertools
import json
import operator

import pytest
import torch
from changed_heads import loss
from compressing import batches_of
from model_runs import aligned, output, sites
from model_sizes import EXACT, FP32_NOISE, HEAD_WIDTH, HEADS, LAYERS
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
from unchanged import refused

from collab_heads import (
    collaborative_config,
    compress,
    fold_heads,
    get_adapter,
    plan,
    prune_heads,
    swap_to_alpha,
    swap_to_collaborative,
    swap_to_gated,
)
from collab_heads.calibration import calibrate
from collab_heads.compression.parts.shape import Choice
from collab_heads.compression.parts.table import fit_site
from collab_heads.errors import ModelStateError
from collab_heads.fitting import frequency_pairs, kinds
from collab_heads.fitting.fit import FitOptions
from collab_heads.layers import rotary_query_key
from collab_heads.layers.rotary_query_key import RotaryQueryKey, dims_of, turned
from families import FAMILIES
from test_contract import real, stepwise

OWN = ("llama", "modernbert", "esm-rotary")  # with forwards of their own
OTHERS = [name for name, each in FAMILIES.items() if each.narrows and not each.shares and name not in OWN]
PAIRS = HEAD_WIDTH // 2


def of(*names: str, slow: list[str] | None = None):
    """Families, some of them in `make test-slow` only."""
    cases = [
        pytest.param(FAMILIES[name], id=name, marks=[pytest.mark.slow] * (name not in names))
        for name in (*names, *(slow or []))
    ]
    return pytest.mark.parametrize("rotary", cases)


of_every_family = of(*OWN, slow=OTHERS)
of_every_forward = of(*OWN)
of_every_decoder = of("llama", slow=[name for name in OTHERS if FAMILIES[name].generates])


def narrow(model, width=EXACT // 2, **more):
    return swap_to_collaborative(model, dim_shared_query_key=width, kind="per_head", **more)


def query_keys(model) -> list[RotaryQueryKey]:
    return [module.query_key for module in sites(model).values()]


def without_pairs(model, kept) -> None:
    """A stock model whose heads have zeros where they would lose the other pairs: [sites] of [H_k, n]."""
    adapter = get_adapter(model)
    for site, pairs in zip(adapter.sites(model), kept, strict=True):
        module = model.base_model.get_submodule(site.path)
        weights = adapter.read(module)
        groups = range(site.num_heads) if site.groups is None else site.groups
        for part, of_heads in (("query", groups), ("key", range(site.num_key_heads)), ("query_bias", groups)):
            tensor = getattr(weights, part)
            if tensor is not None:
                for head, key_head in enumerate(of_heads):
                    gone = torch.ones(HEAD_WIDTH, dtype=torch.bool)
                    gone[dims_of(pairs[key_head], HEAD_WIDTH)] = False
                    tensor.data[head, gone] = 0


@of_every_family
@pytest.mark.parametrize("backend", ("eager", "sdpa"))
def test_the_others_are_as_if_they_were_zero(rotary, backend):
    """Each key head keeps pairs of its own; what is left computes what the stock model does with zeros elsewhere."""
    model, zeros, inputs = rotary.build().double(), rotary.build().double(), rotary.inputs()
    model.set_attn_implementation(backend)
    zeros.set_attn_implementation(backend)
    narrow(model)
    kept = [query_key.pairs for query_key in query_keys(model)]
    assert all(each.pairs.shape == (each.num_key_heads, PAIRS // 2) for each in query_keys(model))
    assert len({tuple(row) for pairs in kept for row in pairs.tolist()}) > 1  # not the same everywhere
    without_pairs(zeros, kept)
    assert not torch.allclose(output(zeros, inputs), output(rotary.build().double(), inputs), atol=0.1)
    torch.testing.assert_close(
        real(output(model, inputs), inputs), real(output(zeros, inputs), inputs), rtol=0, atol=FP32_NOISE
    )


@of_every_forward
def test_all_pairs_are_the_stock_heads(rotary):
    """Gathered and turned by our own code, as if some had gone."""
    model, inputs = rotary.build().double(), rotary.inputs()
    before = output(model, inputs)
    narrow(model, EXACT)
    assert all(query_key.pairs is None for query_key in query_keys(model))
    for query_key in query_keys(model):
        query_key.pairs = torch.arange(PAIRS).repeat(query_key.num_key_heads, 1)
    torch.testing.assert_close(real(output(model, inputs), inputs), real(before, inputs), rtol=0, atol=FP32_NOISE)


def neighbours(pairs, dim_head):
    """Pairs of neighbouring dimensions, as other code bases lay them out."""
    return torch.cat([2 * pairs, 2 * pairs + 1], dim=-1)


def break_rows(monkeypatch):
    monkeypatch.setattr("collab_heads.layers.rotary_query_key.dims_of", neighbours)


def break_turning(monkeypatch):
    def interleaved(heads, cos, sin):
        first, second = heads[..., ::2], heads[..., 1::2]
        return heads * cos + torch.stack([-second, first], dim=-1).flatten(-2) * sin

    monkeypatch.setattr(rotary_query_key, "turned", interleaved)


def break_direction(monkeypatch):
    def backwards(heads, cos, sin):
        return turned(heads, cos, -sin)

    stock, first = turned, []

    def once(heads, cos, sin):  # of the keys alone: both at once would cancel
        first.append(heads)
        return backwards(heads, cos, sin) if len(first) % 2 else stock(heads, cos, sin)

    monkeypatch.setattr(rotary_query_key, "turned", once)


def break_frequencies(monkeypatch):
    stock = rotary_query_key.of_pairs
    monkeypatch.setattr(rotary_query_key, "of_pairs", lambda angles, pairs: stock(angles, (pairs + 1) % PAIRS))


def break_groups(monkeypatch):
    """Queries at the pairs of another key head."""
    stock = rotary_query_key.of_pairs
    monkeypatch.setattr(rotary_query_key, "of_pairs", lambda angles, pairs: stock(angles, pairs.flip(0)))


BREAKS = (break_rows, break_turning, break_direction, break_frequencies, break_groups)


@pytest.mark.parametrize("broken", BREAKS)
def test_a_wrong_pairing_is_caught(broken, monkeypatch):
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        test_the_others_are_as_if_they_were_zero(FAMILIES["llama"], "sdpa")


@of_every_decoder
@pytest.mark.parametrize("more", ({}, {"dim_value": 0.5}), ids=("alone", "values"))
def test_step_by_step(rotary, more):
    """Token by token, through dynamic and static caches, with groups of one size and of several; the cache is less."""
    for heads in ([], [1], [0, 1]):
        model, inputs = rotary.build(), rotary.inputs()
        report = narrow(model, **more)
        if heads:
            prune_heads(model, heads={"dec-self": [heads] * LAYERS})
        whole = output(model, inputs)
        with torch.no_grad():
            for cache in (None, StaticCache(config=model.config, max_cache_len=12)):
                found, cache = stepwise(model, inputs, cache)
                torch.testing.assert_close(found, whole, rtol=0, atol=FP32_NOISE)
        assert {layer.keys.shape[-1] for layer in cache.layers} == {HEAD_WIDTH // 2}
        assert all(site.cache_after < site.cache_before for site in report.sites)


@of_every_forward
def test_stored_and_loaded(rotary, tmp_path):
    """The pairs lie beside the weights; what is loaded, or folded to bfloat16 and loaded, keeps them."""
    model, inputs = rotary.build(), rotary.inputs()
    narrow(model)
    model.save_pretrained(tmp_path)
    loaded = aligned(type(model).from_pretrained(tmp_path).eval())
    assert torch.equal(output(loaded, inputs), output(aligned(model), inputs))
    half = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    for ours, theirs, small in zip(query_keys(model), query_keys(loaded), query_keys(half), strict=True):
        assert torch.equal(ours.pairs, theirs.pairs) and torch.equal(ours.pairs, small.pairs)
    fresh = type(model)(loaded.config)
    assert all(torch.equal(each.pairs[0], torch.arange(PAIRS // 2)) for each in query_keys(fresh))


@of_every_forward
def test_removed_before_or_after(rotary):
    """Key heads take their pairs along; by the weights alone the order of the steps makes no difference."""
    found = []
    (role,) = rotary.roles
    gone = [0, 1] if rotary.name == "llama" else [0, 1, 3]  # key heads as a whole: heads that share one choose together
    for first in (True, False):
        model = rotary.build().double()
        if not first:
            narrow(model)
        prune_heads(model, heads={role: [gone] * LAYERS})
        if first:
            narrow(model, 0.5)
        swap_to_gated(model)
        found.append((json.dumps(model.config.collab_heads), output(model, rotary.inputs())))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=FP32_NOISE)


def test_gates_and_alphas_stay():
    model, inputs = FAMILIES["llama"].build().double(), FAMILIES["llama"].inputs()
    swap_to_gated(model)
    swap_to_alpha(model)
    before = output(model, inputs)
    narrow(model, EXACT)
    torch.testing.assert_close(output(model, inputs), before, rtol=0, atol=FP32_NOISE)
    narrowed = FAMILIES["llama"].build()
    narrow(narrowed)
    with refused(narrowed, ModelStateError, "frequency pairs of their own"):
        fold_heads(narrowed)


def test_full_width_folds_to_stock():
    model = FAMILIES["llama"].build()
    before = model.state_dict()
    narrow(model, EXACT)
    fold_heads(model)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        n: t.shape for n, t in before.items()
    }


@of_every_forward
def test_pairs_that_carry_nothing_go_first(rotary):
    """Each key head has two pairs of its own that give anything; they are found, and nothing is lost."""
    model, inputs = rotary.build().double(), rotary.inputs()
    generator = torch.Generator().manual_seed(0)
    carrying = [
        torch.stack([torch.randperm(PAIRS, generator=generator)[:2].sort().values for _ in range(site.num_key_heads)])
        for site in get_adapter(model).sites(model)
    ]
    without_pairs(model, carrying)
    zero_key_biases(model)
    before = output(model, inputs)
    for calibration in (None, [inputs]):
        found = copy.deepcopy(model)
        report = narrow(found, batches=calibration, refine_steps=0)
        assert all(torch.equal(each.pairs, pairs) for each, pairs in zip(query_keys(found), carrying, strict=True))
        assert max(site.relative_error for site in report.sites) < 1e-6
        torch.testing.assert_close(real(output(found, inputs), inputs), real(before, inputs), rtol=0, atol=FP32_NOISE)


def zero_key_biases(model):
    adapter = get_adapter(model)
    for module in sites(model).values():
        bias = adapter.read(module).key_bias
        if bias is not None:
            bias.data.zero_()


def test_calibration_chooses_better_than_chance():
    """By the divergence of attention that is lost, against all other choices of one key head."""
    model, inputs = FAMILIES["esm-rotary"].build().double(), FAMILIES["esm-rotary"].inputs()
    seen = []
    stock = kinds.choose_pairs

    def watch(grams, count):
        seen.append((grams, stock(grams, count)))
        return seen[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "choose_pairs", watch)
        narrow(model, batches=[inputs], refine_steps=0)
    for grams, chosen in seen:
        for gram, kept in zip(grams, chosen, strict=True):
            costs = {}
            for some in itertools.combinations(range(PAIRS), PAIRS // 2):
                left, total = gram[list(some)], gram.sum(1)[list(some)]
                costs[some] = float(gram.sum() - total @ torch.linalg.solve(left[:, list(some)], total))
            assert costs[tuple(kept.tolist())] <= sorted(costs.values())[1]  # greedy: the best or next to it


def gram(query, key, bias=None, used=None):
    bias = torch.zeros(1, len(query), len(key)) if bias is None else bias[None]
    used = torch.ones(1, len(query)) if used is None else used[None]
    return frequency_pairs.gram(query[None], key[None], bias, used, 0.5)


def some_heads():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, HEAD_WIDTH, generator=generator).double() for length in (5, 7)]


def test_what_is_constant_over_keys_counts_for_nothing():
    """A pair whose keys are all alike gives every key the same score, which the softmax cancels."""
    query, key = some_heads()
    key[:, dims_of(torch.tensor([2]), HEAD_WIDTH)] = 1.0
    found = gram(query, key)
    assert found[2].abs().max() < 1e-12 < found[1, 1]


def test_only_keys_that_are_attended_and_queries_that_are_used_count():
    """The others are as if they were not there; in one piece or several."""
    query, key = some_heads()
    bias = torch.zeros(5, 7).double()
    bias[:, 4:] = -torch.inf
    torch.testing.assert_close(gram(query, key, bias), gram(query, key[:4]))
    torch.testing.assert_close(gram(query, key, used=torch.tensor([1.0, 1, 1, 0, 0]).double()), gram(query[:3], key))
    assert not torch.allclose(gram(query, key[:4]), gram(query, key))
    assert not torch.allclose(gram(query[:3], key), gram(query, key))


def test_the_gram_says_how_attention_diverges():
    """To second order: half the sum of what goes is the divergence of what is left from what there was."""
    query, key = (0.05 * each for each in some_heads())
    left = [each.clone() for each in (query, key)]
    for each in left:
        each[:, dims_of(torch.tensor([0, 3]), HEAD_WIDTH)] = 0
    before, after = ((0.5 * q @ k.mT).log_softmax(-1) for q, k in ((query, key), left))
    divergence = (before.exp() * (before - after)).sum()
    found = gram(query, key)[[0, 3]][:, [0, 3]].sum() / 2
    torch.testing.assert_close(found, divergence, rtol=0.02, atol=0)  # third order: scores are 0.003


def test_factors_stand_in_for_what_went():
    """Planted: a pair gives half of what another one does, so that one by itself gives all, times one and a half."""
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(100, PAIRS, generator=generator).double()
    given[:, 1] = given[:, 2] / 2
    grams = (given.mT @ given)[None]
    pairs = frequency_pairs.choose_pairs(grams, PAIRS - 1)
    assert pairs.tolist() in ([[0, 2, 3]], [[0, 1, 3]])  # either stands in for the other
    factors = frequency_pairs.factors_of(grams, pairs)
    assert factors[0, [0, 2]] == pytest.approx(1, abs=1e-4)  # the ridge's share: 1e-6 of the mean
    assert float(factors[0, 1]) == pytest.approx(1.5 if pairs[0, 1] == 2 else 3, abs=1e-4)
    assert frequency_pairs.share_lost(grams, pairs, factors) < 1e-3
    assert frequency_pairs.share_lost(grams, pairs, torch.ones(1, PAIRS - 1).double()) > 0.1


@of("llama", "modernbert")
def test_the_fit_makes_up_for_some(rotary):
    """The rows of the kept pairs move; the pairs stay, and gradients reach all."""
    model, inputs = rotary.build(), rotary.inputs()
    report = narrow(model, batches=[inputs], refine_steps=20)
    assert all(site.output_error < site.output_error_before for site in report.sites)
    assert "rotary" in str(report)
    loss(model.train(), inputs).backward()
    for query_key in query_keys(model):
        assert all(parameter.grad.abs().sum() > 0 for parameter in query_key.parameters())


@of("llama", "esm-rotary")
def test_compressed(rotary):
    """Narrower queries and keys alone keep to a budget, and what is counted is what there is."""
    model = rotary.build()
    generator = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(3, 61, (8, 9), generator=generator)} for _ in range(3)]
    attention = [p for module in sites(model).values() for p in module.parameters()]
    report = compress(model, batches, 0.85, parts=("query_key",), refine_steps=5)
    left = [p for module in sites(model).values() for p in module.parameters()]
    changed = sum(p.numel() for p in attention) - sum(p.numel() for p in left)
    assert 0 < changed == report.costs["parameters"].before - report.costs["parameters"].after
    assert all(site.kind == "rotary" for site in report.sites if operator.gt(*site.sizes["query_key"]))
    if rotary.name == "llama":
        caches = [model(**each, use_cache=True).past_key_values for each in batches]
        counted = sum(layer.keys.numel() + layer.values.numel() for cache in caches for layer in cache.layers)
        assert counted == report.costs["cache"].after


def test_from_scratch():
    swapped = FAMILIES["llama"].build()
    config = collaborative_config(swapped.config, dim_shared_query_key=0.5, kind="per_head")
    narrow(swapped)
    assert config.collab_heads == swapped.config.collab_heads
    model = type(swapped)(config)
    loss(model.train(), FAMILIES["llama"].inputs()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_widths_are_whole_pairs():
    report = narrow(FAMILIES["llama"].build(), HEADS * 4 - 3)
    assert {(site.dim, site.dim_asked) for site in report.sites} == {(HEADS * 4, HEADS * 4 - 3)}
    assert "frequency pairs" in str(report) and "rounded up" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("least", (calibrate.LEAST, 0))
def test_one_pass_over_the_calls_serves_the_curve_and_all_fits_of_a_site(monkeypatch, least):
    """The Gram matrices of the pairs take longest; they are kept where the moments of a site are made again."""
    model, counted = FAMILIES["llama"].build(), []

    def noted(weights, calls):
        counted.append(weights)
        return frequency_pairs.pair_grams(weights, calls)

    monkeypatch.setattr(kinds, "pair_grams", noted)
    monkeypatch.setattr(calibrate, "LEAST", least)
    monkeypatch.setattr(calibrate, "SHARE", 0)
    made = plan(model, batches_of(FAMILIES["llama"], 8), parts="query_key", refine_steps=2)
    assert (len(made.measured.fitted.groups) > 1) == (least == 0)
    report = compress(model, made, 0.8)
    assert all(site.parameters_after < site.parameters_before for site in report.sites)
    assert len(counted) == len(report.sites) > 1


@pytest.mark.parametrize("first", (None, 0.8))
def test_fewer_heads_have_gram_matrices_of_their_own(first):
    """Those of the curve, and of another budget, are of all heads."""
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    made = plan(model, [{"input_ids": torch.randint(60, (40, 12))}], parts=("heads", "query_key"), refine_steps=0)
    measured = made.measured
    for path, shape in measured.shapes.items():
        for choice in [Choice.of(query_key=4)] * (first is not None) + [Choice.of(heads=1, query_key=4)]:
            seen = measured.fitted.of(path).copied()
            fits = fit_site(measured.layers, path, shape, choice, seen, FitOptions(refine_steps=0))
        assert fits[-1].query_key.state.dim == 4
