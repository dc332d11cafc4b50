"""What the page's script reads: the numbers of the report, rounded, and attention to within a byte."""

import base64
import json
import zlib

import pytest
import torch
from model_inputs import cast

from collab_heads import analyze_heads
from collab_heads.analysis.measures.sentences import AttentionExample
from collab_heads.analysis.report.head_report import HeadReport, full_page
from collab_heads.analysis.report.page_data import LONGEST, STEPS, as_json, heads_of, page_data, sentence_data, shown
from collab_heads.sites.site import AttentionSite
from families import FAMILIES

ROUNDED = 5e-4  # relative: four digits
HALF_A_STEP = 0.5 / STEPS + 1e-6


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
        assert measure["ends"] == [min(values), max(values)] and measure["title"] and measure["legend"]


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
        packed = packed[size:]
    assert not packed
    return found


def test_attention_is_that_of_the_sentences(report, data):
    assert len(data["sentences"]) == len(report.examples) == 3
    lengths = [sentence["length"]["encoder"] for sentence in data["sentences"]]
    assert lengths == sorted(lengths) and len(set(lengths)) == 3
    for sentence, example in zip(data["sentences"], report.examples, strict=True):
        for site, weights in zip(report.sites, weights_of(sentence, data["sites"]), strict=True):
            torch.testing.assert_close(weights, example.of(site)[0], rtol=0, atol=HALF_A_STEP)


def test_long_sentences_are_cut_and_odd_tokens_can_be_seen():
    site, length = AttentionSite("one", "enc-self", 0, 2), LONGEST + 5
    tokens = ("</script>", *["a"] * (length - 1))
    whole = torch.rand(2, length, length).softmax(-1)
    example = AttentionExample({"encoder": tokens}, {"one": whole})
    sentence = sentence_data(example, [site], str)
    assert sentence["length"] == {"encoder": length} and len(sentence["tokens"]["encoder"]) == LONGEST
    (weights,) = weights_of(sentence, [{"heads": 2, "sides": ["encoder", "encoder"]}])
    torch.testing.assert_close(weights, whole[:, :LONGEST, :LONGEST], rtol=0, atol=HALF_A_STEP)
    assert "</" not in as_json(sentence) and json.loads(as_json(sentence)) == sentence


def test_what_stands_for_a_space_is_one():
    assert [shown(token) for token in ("\u2581dog", "\u0120dog", "##s", "a b")] == ["␣dog", "␣dog", "##s", "a␣b"]


def test_a_page_of_many_heads_is_light():
    """12 x 12 heads, eight sentences of noise, which cannot be compressed: below 3 MB."""
    sites = tuple(AttentionSite(f"layer.{n}", "enc-self", n, 12) for n in range(12))
    tokens = tuple(f"token{n}" for n in range(LONGEST))
    examples = tuple(
        AttentionExample({"encoder": tokens}, {site.path: torch.rand(12, LONGEST, LONGEST) for site in sites})
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
