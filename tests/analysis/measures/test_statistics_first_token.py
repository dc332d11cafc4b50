"""Attention to the first token: known weights, whose queries count, and where nothing can be said."""

import json

import pytest
from heads_by_hand import EOS, ended, measure, model_in, sites_with_heads
from known_heads import looking, show, site, text
from model_inputs import cast
from model_sizes import EXACT64

from collab_heads import analyze_heads, get_adapter
from collab_heads.analysis import HeadStatistics
from collab_heads.analysis.measures.statistics import Statistics
from collab_heads.analysis.report.head_report import summary
from collab_heads.errors import CalibrationError
from families import FAMILIES

IDS = [[5, 10, 11, 3, 12], [6, 10, 3, 0, 0]]
PLANTED, REST = 0.6, 0.4 / 4  # the weights of a head that is made by hand


def measured(batches, sites=None, **options) -> HeadStatistics:
    model, sites, statistics = FAMILIES["bert"].build(), sites or [site()], Statistics("first_token")
    show(statistics, sites, batches, **options)
    return statistics.results(model, get_adapter(model), ())


@pytest.mark.parametrize("left", (False, True))
def test_the_weight_on_the_first_token_of_the_queries_after_it(left):
    """One head looks there, one at itself; padding, the first token and what is excluded are not queries."""
    sinks, selves = [[0] * 5, [2 if left else 0] * 5], [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    looks = [[sinks[row], selves[row]] for row in range(2)]
    ids = [IDS[0], [0, 0, 6, 10, 3]] if left else IDS
    found = measured([(text(ids, [5, 3], left), {"one": looking(looks, 5)})], exclude=[3])
    assert found.first_token["one"].tolist() == pytest.approx([PLANTED, REST], abs=EXACT64)
    assert found.tokens == {"one": 3 + 1}


def test_it_is_a_mean_over_tokens_of_all_batches():
    """Two tokens look at the first one, then one of four: three of six."""
    batches = [
        (text([IDS[1][:3]]), {"one": looking([[[0, 0, 0], [0, 1, 2]]], 3)}),
        (text([IDS[0]]), {"one": looking([[[0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]], 5)}),
    ]
    found = measured(batches).first_token["one"].tolist()
    assert found == pytest.approx([(3 * PLANTED + 3 * REST) / 6, (2 * 0.4 / 2 + 4 * REST) / 6], abs=EXACT64)


def test_cross_attention_has_none():
    sites = [site("a", "enc-self"), site("b", "dec-self"), site("c", "dec-enc")]
    looks = {each.path: looking([[[0] * 5, [0] * 5]], 5) for each in sites}
    found = measured([(text([IDS[0]]), looks)], sites)
    assert found.first_token.keys() == {"a", "b"} and found.tokens == {"a": 4, "b": 4, "c": 0}
    line = next(line for line in str(found).split("\n") if line.startswith("c "))
    assert line.split()[-1] == "-"


def test_lone_tokens():
    """They have none before them: nothing is said of it, and the other measures are as they are."""
    lone = (text([IDS[0]], [1]), {"one": looking([[[0] * 5, [0] * 5]], 5)})
    with pytest.raises(CalibrationError, match="one saw no query token"):
        measured([lone])
    model, (inputs, _) = model_in("bert"), ended("bert")
    lone = {name: value[:, :1] for name, value in inputs.items()}
    found = measure(model, [lone])
    assert found.first_token == {} and found.confidence.keys() == found.tokens.keys()
    assert "first_token" not in analyze_heads(model, [lone], parts="statistics", exclude=[]).scores()
    assert measure(model, [lone, inputs]).first_token.keys() == found.tokens.keys()


def test_on_disk_in_the_report_and_in_statistics_of_an_older_version(tmp_path):
    model, (inputs, _) = model_in("marian"), ended("marian")
    inputs = cast(inputs, model.dtype)
    report = analyze_heads(model, [inputs], parts="statistics", exclude=[EOS])
    found, selves = report.statistics, {s.path for s in sites_with_heads(model) if s.role != "dec-enc"}
    assert found.first_token.keys() == selves and report.scores()["first_token"] is found.first_token
    assert json.loads(report.to_json())["statistics"]["first_token"].keys() == selves
    header, rows = summary(report)
    of_roles = {row[0]: row[header.index("first token")] for row in rows}
    of_encoder = [float(v) for s in report.sites if s.role == "enc-self" for v in found.first_token[s.path]]
    assert of_roles["enc-self"] == f"{sum(of_encoder) / len(of_encoder):.3f}" and of_roles["dec-enc"] == ""
    found.save(tmp_path)
    assert HeadStatistics.load(tmp_path) == found
    described = json.loads((tmp_path / "head_statistics.json").read_text())
    described["measures"].remove("first_token")
    for each in described["sites"]:
        del each["first_token"]
    (tmp_path / "head_statistics.json").write_text(json.dumps(described))
    old = HeadStatistics.load(tmp_path)
    assert old.first_token == {} and old.sites == found.sites and old.confidence.keys() == found.confidence.keys()
