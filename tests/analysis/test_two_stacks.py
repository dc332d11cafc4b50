"""Analysis of models that read texts and images at once: ids are those of the texts, the rest is of both stacks."""

import pytest
import torch
from compressing import batches_of
from heads_by_hand import maps_by_hand
from model_sizes import HEADS

from collab_heads import analyze_heads, get_adapter
from collab_heads.analysis import HeadStatistics, head_importance
from collab_heads.heads.criteria import Gradient
from families import FAMILIES


def pairs(name, count=3):
    return [inputs | {"return_loss": True} for inputs in batches_of(FAMILIES[name], count)]


@pytest.fixture(params=("clip", "siglip"), scope="module")
def analysed(request):
    model = FAMILIES[request.param].build()
    return model, pairs(request.param), analyze_heads(model, pairs(request.param))


def test_all_that_is_not_about_tokens_is_measured_at_every_site(analysed):
    model, batches, report = analysed
    paths = [site.path for site in get_adapter(model).sites(model)]
    for values in (report.statistics.confidence, report.statistics.entropy, report.relevance.signed, report.gradient):
        assert list(values) == paths
        assert all(value.shape == (HEADS,) and torch.isfinite(value).all() for value in values.values())
        assert any(value.abs().max() > 0 for value in values.values())
    assert len({report.statistics.tokens[path] for path in paths}) == 2
    alone = head_importance(model, batches, criterion=Gradient(normalize=False))
    assert all(torch.allclose(report.gradient[path].float(), alone[path]) for path in paths)


def test_images_have_no_tokens(analysed):
    """Confidence, by hand, of the images; their examples show positions; rare tokens are those of the texts."""
    model, batches, report = analysed
    for site in get_adapter(model).sites(model):
        if site.stack == "vision":
            inputs = [{name: value for name, value in each.items() if name != "return_loss"} for each in batches]
            largest = [maps_by_hand(model, each)[site.path][0].max(-1).values for each in inputs]  # (B, H, T)
            expected = torch.cat(largest).mean((0, 2)).double()
            torch.testing.assert_close(report.statistics.confidence[site.path], expected, rtol=0, atol=1e-5)
            assert report.examples[0].of(site)[1] == tuple(map(str, range(len(report.examples[0].of(site)[1]))))
    rare = {site for site, numbers in report.roles.rare.items() if numbers is not None}
    assert rare and all(path.startswith("text_model") for path in rare)


def test_the_report_has_a_row_for_every_head_of_both(analysed, tmp_path):
    """Also where they have one role: layers tell them apart."""
    model, _, report = analysed
    sites = get_adapter(model).sites(model)
    _, rows = report.rows()
    assert len({tuple(row[:3]) for row in rows}) == len(rows) == HEADS * len(sites)
    assert report.to_dict()["sites"] == [site.to_dict() for site in sites]
    assert {site["stack"] for site in report.to_dict()["sites"]} == {"text", "vision"}
    report.statistics.save(tmp_path)
    assert HeadStatistics.load(tmp_path).sites == tuple(sites)
