"""What the page's script reads: the numbers of the report, rounded, and attention to within a byte."""

import base64
import json
import zlib
from dataclasses import replace

import pytest
import torch
from model_inputs import cast

from collab_heads import AttentionSite, analyze_heads
from collab_heads.analysis import HeadReport
from collab_heads.analysis.measures.sentences import AttentionExample
from collab_heads.analysis.report import page_data as page_data_module
from collab_heads.analysis.report.head_report import full_page
from collab_heads.analysis.report.page_data import (
    MOST_WEIGHTS,
    STEPS,
    anchor,
    as_json,
    heads_of,
    page_data,
    sentence_data,
    shown,
)
from families import FAMILIES

ROUNDED = 5e-4  # relative: four digits
HALF_A_STEP = 0.5 / STEPS + 1e-6  # of a weight, or of its square root


@pytest.fixture(scope="module")
def data(report) -> dict:
    return json.loads(as_json(page_data(report)))


def test_heads_have_the_numbers_of_the_report(report, data):
    heads, scores = heads_of(report), report.scores()
    assert len(data["heads"]) == len(heads) == sum(site.num_heads for site in report.sites)
    assert [each["name"] for each in data["measures"]][: len(scores)] == [name.replace("_", " ") for name in scores]
    for head, written in zip(heads, data["heads"], strict=True):
        site = data["sites"][written["site"]]
        assert (site["path"], site["layer"], site["group"]) == (head.site.path, head.site.layer, head.site.role)
        assert written["number"] == report.heads[head.site.path][head.index] == head.number
        for each, value in zip(scores.values(), written["values"], strict=False):
            known = head.site.path in each
            assert (value is not None) == known
            if known:
                assert value == pytest.approx(float(each[head.site.path][head.index]), rel=ROUNDED)
        assert written["labels"] == list(report.roles.labels[head.site.path][head.index])
    assert {site["total"] for site in data["sites"]} == {4}
    for place, measure in enumerate(data["measures"]):
        values = [each["values"][place] for each in data["heads"] if each["values"][place] is not None]
        assert measure["stops"][0] <= min(values) <= max(values) <= measure["stops"][-1]
        assert measure["stops"] == sorted(measure["stops"]) and measure["title"] and measure["legend"]


def test_nearest_heads_are_those_with_the_largest_cosine(report, data):
    for head, written in zip(heads_of(report), data["heads"], strict=True):
        path, numbers = head.site.path, report.heads[head.site.path]
        expected = {
            number: float(report.statistics.cosine[path][head.index, other])
            for other, number in enumerate(numbers)
            if other != head.index
        }
        assert dict(written["nearest"]) == pytest.approx(expected, rel=ROUNDED)
        cosines = [cosine for _, cosine in written["nearest"]]
        assert cosines == sorted(cosines, reverse=True)


def weights_of(sentence: dict, sites) -> list[torch.Tensor]:
    """What the script makes of the bytes."""
    packed, found = zlib.decompress(base64.b64decode(sentence["maps"])), []
    for site in sites:
        shape = (site["heads"], *(len(sentence["tokens"][side]) for side in site["sides"]))
        size = torch.Size(shape).numel()
        found.append(torch.frombuffer(bytearray(packed[:size]), dtype=torch.uint8).view(shape) / STEPS)
        found[-1] **= sentence["power"]
        packed = packed[size:]
    assert not packed
    return found


def test_attention_is_that_of_the_sentences(report, data):
    assert len(data["sentences"]) == len(report.examples) == 3
    lengths = [sentence["length"]["encoder"] for sentence in data["sentences"]]
    assert lengths == sorted(lengths) and len(set(lengths)) == 3
    for sentence, example in zip(data["sentences"], report.examples, strict=True):
        for site, weights in zip(report.sites, weights_of(sentence, data["sites"]), strict=True):
            torch.testing.assert_close(weights.sqrt(), example.of(site)[0].sqrt(), rtol=0, atol=HALF_A_STEP)


LONG = {"heads": 2, "sides": ["encoder", "encoder"]}


def long_sentence(length: int) -> tuple[AttentionExample, AttentionSite, torch.Tensor]:
    """A sentence whose weights are as small as those of many tokens, with one large weight a row."""
    whole = (torch.rand(2, length, length) + 5 * torch.eye(length)).softmax(-1)
    example = AttentionExample({"encoder": ("</script>", *["a"] * (length - 1))}, {"one": whole})
    return example, AttentionSite("one", "enc-self", 0, 2), whole


def test_a_long_sentence_has_all_of_its_tokens():
    """And rows whose weights, the small ones too, still sum to one."""
    example, site, whole = long_sentence(300)
    sentence = sentence_data(example, [site], str)
    assert sentence["length"] == {"encoder": 300} and sentence["tokens"]["encoder"] == ["</script>", *["a"] * 299]
    (weights,) = weights_of(sentence, [LONG])
    assert sentence["power"] == 2
    torch.testing.assert_close(weights.sqrt(), whole.sqrt(), rtol=0, atol=HALF_A_STEP)
    assert (weights.sum(-1) - 1).abs().max() < 0.02
    assert "</" not in as_json(sentence) and json.loads(as_json(sentence)) == sentence


def test_many_weights_are_stored_plain_and_too_many_are_cut(monkeypatch):
    example, site, whole = long_sentence(50)
    monkeypatch.setattr(page_data_module, "MOST_ROOTS", 2 * 40 * 40 - 1)
    sentence = sentence_data(example, [site], str)
    assert sentence["power"] == 1 and len(sentence["tokens"]["encoder"]) == 50
    torch.testing.assert_close(weights_of(sentence, [LONG])[0], whole, rtol=0, atol=HALF_A_STEP)
    monkeypatch.setattr(page_data_module, "MOST_WEIGHTS", 2 * 40 * 40)
    sentence = sentence_data(example, [site], str)
    assert sentence["length"] == {"encoder": 50} and len(sentence["tokens"]["encoder"]) == 40
    torch.testing.assert_close(weights_of(sentence, [LONG])[0], whole[:, :40, :40], rtol=0, atol=HALF_A_STEP)
    assert 144 * 512 * 512 < MOST_WEIGHTS  # 144 heads of 512 tokens are shown whole


def test_links_name_role_layer_and_head(report, data):
    names = [each["anchor"] for each in data["heads"]]
    assert names == [f"{head.site.role}-{head.site.layer}-{head.number}" for head in heads_of(report)]
    one_role = replace(report, sites=report.sites[:1])
    assert [anchor(one_role, head) for head in heads_of(one_role)] == [
        f"{report.sites[0].layer}-{number}" for number in report.heads[report.sites[0].path]
    ]


def test_what_stands_for_a_space_is_one():
    assert [shown(token) for token in ("\u2581dog", "\u0120dog", "##s", "a b")] == ["␣dog", "␣dog", "##s", "a␣b"]


TOKENS = 40


def test_a_page_of_many_heads_is_light():
    """12 x 12 heads, eight sentences of 40 tokens of noise, which cannot be compressed: below 3 MB."""
    sites = tuple(AttentionSite(f"layer.{n}", "enc-self", n, 12) for n in range(12))
    tokens = tuple(f"token{n}" for n in range(TOKENS))
    examples = tuple(
        AttentionExample({"encoder": tokens}, {site.path: torch.rand(12, TOKENS, TOKENS) for site in sites})
        for _ in range(8)
    )
    scores = {site.path: torch.rand(12) for site in sites}
    heads, totals = {site.path: tuple(range(12)) for site in sites}, {site.path: 12 for site in sites}
    data = {"name": "noise", "sentences": 8, "query_tokens": {"enc-self": 320}}
    report = HeadReport("M", "m", sites, heads, totals, data, gradient=scores, gates=scores, examples=examples)
    text = full_page(report, {})
    assert 2_000_000 < len(text.encode()) < 3_000_000


def test_heads_that_share_keys_and_a_report_without_roles():
    model, inputs = FAMILIES["llama"].build().double(), FAMILIES["llama"].inputs()
    report = analyze_heads(model, [cast(inputs, model.dtype)], parts="statistics", exclude=[], num_examples=0)
    data = page_data(report)
    assert data["roles"] is None and data["sentences"] == [] and all(not each["labels"] for each in data["heads"])
    for site in report.sites:
        keys = [each["key"] for each, head in zip(data["heads"], heads_of(report), strict=True) if head.site == site]
        assert keys == list(site.groups) and site.shares_keys
    for each in data["heads"]:
        cosines = [cosine for _, cosine in each["nearest"]]
        assert len(cosines) == 3 and cosines == sorted(cosines, reverse=True)
    assert all(each["sharesKeys"] for each in data["sites"])
