"""What a budget is of, where sites are called several times or see different numbers of tokens."""

import math

import pytest
import torch
from compressing import batches_of
from model_sizes import VOCABULARY
from slow_cases import slow

from collab_heads import compress, plan
from collab_heads.compression.parts.table import size_with
from collab_heads.layers.removed import NoHeads
from families import FAMILIES

ALBERT, MARIAN, GEMMA = FAMILIES["albert-groups"], FAMILIES["marian"], FAMILIES["gemma3"]


@pytest.mark.slow
def test_layers_that_share_a_site_share_its_parameters_and_cache_one_by_one():
    """Of three layers two share a group, of which each has two sites."""
    model = ALBERT.build()
    parameters, neurons, cached = 4 * (32 * 32 + 32), 2 * 32 * 37 + 37 + 32, 2 * 32
    report = compress(model, batches_of(ALBERT), 0.5, refine_steps=0)
    assert report.costs["parameters"].before == 4 * parameters + 4 * neurons
    tokens = sum(batch["input_ids"].numel() for batch in batches_of(ALBERT))
    assert report.costs["cache"].before == (2 + 2 + 1 + 1) * cached * tokens
    assert not any(site.cache_before or site.cache_after for site in report.sites)  # of an encoder
    attention = [site for site in report.sites if site.role == "enc-self"]
    after = [site.sizes["query_key"][1] + site.sizes["values"][1] or NoHeads.cache_width for site in attention]
    assert report.costs["cache"].after == (2 * after[0] + 2 * after[1] + after[2] + after[3]) * tokens
    assert report.costs["parameters"].after == sum(site.parameters_after for site in report.sites)


def translations(*lengths):
    """Batches of one source and one target of these lengths."""
    tokens = torch.arange(3, VOCABULARY).repeat(2)
    return [
        {"input_ids": tokens[i : i + source][None], "decoder_input_ids": tokens[3 * i : 3 * i + target][None]}
        for i, (source, target) in enumerate(lengths)
    ]


@pytest.mark.slow
def test_of_a_translator_sources_and_targets_are_cached_by_their_numbers():
    """Of 17 tokens in all sources and 12 in all targets; the encoder caches nothing."""
    report = compress(MARIAN.build(), translations((9, 6), (8, 6)), 0.5, of="cache", refine_steps=0)
    tokens = {"enc-self": 0, "dec-self": 12, "dec-enc": 17}
    before, after = (
        sum(tokens[site.role] * getattr(site, f"cache_{when}") for site in report.sites) for when in ("before", "after")
    )
    assert (report.costs["cache"].before, report.costs["cache"].after) == (before, after)
    assert report.costs["cache"].share <= 0.5


@pytest.mark.parametrize("name", ["marian", *slow("t5")])
@pytest.mark.parametrize("lengths", [[(9, 6)], [(13, 8), (14, 14)]], ids=["one batch", "two batches"])
def test_a_budget_of_cache_takes_the_best_plan_of_exactly_its_size(name, lengths):
    """Whole numbers of elements, summed by hand: shares of tokens would be rounded, and some budgets just missed."""
    made = plan(FAMILIES[name].build(), translations(*lengths), of="cache", shape="free", refine_steps=0)
    tokens = {
        "enc-self": 0,
        "dec-enc": sum(source for source, _ in lengths),
        "dec-self": sum(target for _, target in lengths),
    }
    best = {0: 0.0}  # elements of the sites so far -> the least squared error
    for path, use in made.measured.uses.items():
        found = {}
        for choice in made.by_path[path].choices:
            size, error = tokens[use.role] * size_with(use.shape, choice).cache, made.option(path, choice).error
            for elements, before in best.items():
                found[elements + size] = min(found.get(elements + size, math.inf), before + error)
        best = found
    whole, least = max(best), math.inf
    assert made.whole == whole and min(best) / whole == made.least
    rounded = [elements for elements in best if elements / whole * whole != elements]
    assert rounded or len(lengths) == 1  # 49 tokens in all: floats know no 49th
    for elements in [*sorted(best)[:: max(len(best) // 200, 1)][:-1], *rounded[:100]]:
        least = min(error for other, error in best.items() if other <= elements)
        assert made.predicted(made.choose(elements / whole)) ** 2 == pytest.approx(least, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("length", [4, 9, 20])
def test_layers_whose_window_slides_cache_no_more_than_the_cache_layer_does(length):
    """Every budget is of what `past_key_values` holds after a text, here of a layer of each type."""
    model = GEMMA.build().eval()
    batch = {"input_ids": torch.arange(3, 3 + length)[None].repeat(2, 1)}
    report = compress(model, [batch] * 2, 0.6, of="cache", refine_steps=0)
    layers = {
        when: each(**batch, use_cache=True).past_key_values.layers
        for when, each in (("before", GEMMA.build().eval()), ("after", model))
    }
    for when, cost in (("before", report.costs["cache"].before), ("after", report.costs["cache"].after)):
        assert cost == 2 * sum(layer.keys.numel() + layer.values.numel() for layer in layers[when])
