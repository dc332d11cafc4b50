"""What a budget is of, where sites are called several times or see different numbers of tokens."""

import pytest
from compressing import batches_of

from collab_heads import compress
from families import FAMILIES

ALBERT, MARIAN = FAMILIES["albert-groups"], FAMILIES["marian"]


def test_layers_that_share_a_site_share_its_parameters_and_cache_one_by_one():
    """Of three layers two share a group, of which each has two sites."""
    model = ALBERT.build()
    parameters, neurons, cached = 4 * (32 * 32 + 32), 2 * 32 * 37 + 37 + 32, 2 * 32
    report = compress(model, batches_of(ALBERT), 0.5, refine_steps=0)
    assert report.costs["parameters"].before == 4 * parameters + 4 * neurons
    assert report.costs["cache"].before == (2 + 2 + 1 + 1) * cached
    assert [site.cache_before for site in report.sites] == 4 * [cached, 0]
    after = [site.cache_after for site in report.sites if site.cache_before]
    assert report.costs["cache"].after == 2 * after[0] + 2 * after[1] + after[2] + after[3]
    assert report.costs["parameters"].after == sum(site.parameters_after for site in report.sites)


def test_of_a_translator_sources_and_targets_are_cached_by_their_numbers():
    """Of 9 tokens in a source and 6 in a target; the encoder caches nothing."""
    report = compress(MARIAN.build(), batches_of(MARIAN), 0.5, of="cache", refine_steps=0)
    share = {"enc-self": 0, "dec-self": 6 / 9, "dec-enc": 1}
    before, after = (
        sum(share[site.role] * getattr(site, f"cache_{when}") for site in report.sites) for when in ("before", "after")
    )
    assert report.costs["cache"].before == pytest.approx(before)
    assert report.costs["cache"].after == pytest.approx(after)
    assert report.costs["cache"].share <= 0.5
