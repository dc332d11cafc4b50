"""Numbers of heads over a training: heads that are removed, measures that come later, files, what is refused."""

import json
import math

import pytest
import torch

from collab_heads import AttentionSite
from collab_heads.errors import ArgumentError, DataError, NonFiniteError, ShapeError
from collab_heads.heads.history import ALPHAS, HeadHistory, Moment, rounded

SITES = (AttentionSite("a", "enc-self", 0, 3), AttentionSite("b", "dec-enc", 1, 2))
HEADS = {"a": (0, 2, 3), "b": (0, 1)}
NAN = math.nan


def moment(step: int, stage: str = "fine_tuned") -> Moment:
    return Moment(step, 1, stage)


def same(found: torch.Tensor, expected: list) -> bool:
    return torch.equal(found.nan_to_num(nan=-7.0), torch.tensor(expected, dtype=torch.float64).nan_to_num(nan=-7.0))


def history() -> HeadHistory:
    """Head 2 of "a" goes before the last moment; then there are gates on "a", and alphas on "b"."""
    begun = HeadHistory(SITES, HEADS).record(moment(0), {"confidence": {"a": [0.1, 0.2, 0.3], "b": [0.4, 0.5]}})
    values = {
        "confidence": {"a": [0.15, 0.35], "b": [0.45, 0.55]},
        "gates": {"a": torch.tensor([1.0, 0.5])},
        ALPHAS: {"b": torch.tensor([[1.0, 0.25], [0.0, 1.0]])},
    }
    return begun.record(moment(5, "again"), values, {"a": (0, 3), "b": (0, 1)})


def test_heads_keep_their_places_when_others_go():
    found = history()
    assert same(found.values["confidence"]["a"], [[0.1, 0.2, 0.3], [0.15, NAN, 0.35]])
    assert same(found.values["confidence"]["b"], [[0.4, 0.5], [0.45, 0.55]])
    assert same(found.values["gates"]["a"], [[NAN] * 3, [1.0, NAN, 0.5]])
    assert same(found.values[ALPHAS]["b"], [[[NAN] * 2] * 2, [[1.0, 0.25], [0.0, 1.0]]])
    assert [found.where(measure) for measure in ("confidence", "gates", ALPHAS, "base")] == [[0, 1], [1], [1], []]
    later = found.record(moment(5), {"confidence": {"b": [0.6, 0.7]}})  # a site without heads says nothing
    assert same(later.values["confidence"]["a"][2], [NAN] * 3) and later.where("gates") == [1]
    assert len(found.moments) == 2  # the one before does not change


def test_alphas_of_heads_that_are_left():
    found = HeadHistory(SITES, HEADS).record(moment(0), {ALPHAS: {"a": [[1.0, 2.0], [3.0, 4.0]]}}, {"a": (0, 3)})
    assert same(found.values[ALPHAS]["a"][0], [[1.0, NAN, 2.0], [NAN] * 3, [3.0, NAN, 4.0]])


def test_what_is_stored_is_what_is_read_again(tmp_path):
    found = history().record(moment(9), {"confidence": {"b": [1 / 3, 1e-9 / 7]}})
    found.save(tmp_path / "history.json")
    again = HeadHistory.load(tmp_path / "history.json")
    assert again.to_json() == found.to_json() and again.moments == found.moments
    assert again.sites == found.sites and again.heads == found.heads
    for measure, of_measure in found.values.items():
        for path, rows in of_measure.items():
            assert same(again.values[measure][path], rows.tolist())
    stored = json.loads((tmp_path / "history.json").read_text())
    assert stored["values"]["confidence"]["b"][2] == [0.333333, 1.42857e-10]
    assert stored["values"]["gates"]["a"] == [[None] * 3, [1.0, None, 0.5], [None] * 3]
    for longer in (found, again):  # what goes on from a file ends as what never stopped
        step = longer.record(moment(12), {"confidence": {"b": [2 / 3, 0.1]}})
        assert step.values["confidence"]["b"][-1].tolist() == [0.666667, 0.1]


def test_six_digits_are_kept():
    assert rounded(torch.tensor([[123456.7, 0.12345678], [-1e-12 / 3, 0.0]])).tolist() == [
        [123457.0, 0.123457],
        [-3.33333e-13, 0.0],
    ]


@pytest.mark.parametrize(
    "step, values, heads, error, message",
    (
        (-1, {}, None, ArgumentError, "step -1 comes after step 5"),
        (6, {"confidence": {"aa": [0.1]}}, None, ArgumentError, "'aa', which is none of the sites"),
        (6, {"confidence": {"a": [0.1, 0.2]}}, None, ShapeError, r"confidence of a: \(2,\) numbers for 3 heads"),
        (6, {ALPHAS: {"b": [0.1, 0.2]}}, None, ShapeError, r"alphas of b: \(2,\) numbers for 2 heads"),
        (6, {"confidence": {"b": [0.1, NAN]}}, None, NonFiniteError, "confidence of b"),
        (6, {"confidence": {"a": [0.1]}}, {"a": (1,)}, ArgumentError, "a had no head 1 when the history began"),
    ),
)
def test_what_cannot_be_recorded(step, values, heads, error, message):
    found = history()
    with pytest.raises(error, match=message):
        found.record(moment(step), values, heads)
    assert len(found.moments) == 2


def test_a_history_of_nothing():
    with pytest.raises(ArgumentError, match="at least one site"):
        HeadHistory((), {})


@pytest.mark.parametrize(
    "change, message",
    (
        (lambda stored: stored.update(version=2), "version 2; this package reads version 1"),
        (lambda stored: stored.pop("moments"), "not a history of heads"),
        (lambda stored: stored.update(moments=[[0, 1]]), "not a history of heads"),
        (lambda stored: stored["values"]["confidence"].update(a=[[0.1]]), "not a history of heads"),
        (lambda stored: stored["values"]["confidence"].update(c=[[0.1]]), "not a history of heads"),
        (lambda stored: stored["values"]["confidence"].update(a=[["x"] * 3] * 2), "not a history of heads"),
        (lambda stored: stored.update(sites=[]), "not a history of heads"),
        (
            lambda stored: stored["values"].update(gates={"a": [[0.5, 1e30, 0]] * 2}),
            r"gates of a: 1e\+30 is not",
        ),
    ),
)
def test_files_that_are_damaged(change, message, tmp_path):
    stored = history().to_dict()
    change(stored)
    path = tmp_path / "history.json"
    path.write_text(json.dumps(stored))
    with pytest.raises(DataError, match=message) as caught:
        HeadHistory.load(path)
    assert str(path) in str(caught.value)
    for text in ("{", "[]", "null", '"x"'):
        path.write_text(text)
        with pytest.raises(DataError, match="not a history of heads"):
            HeadHistory.load(path)
    with pytest.raises(DataError, match=r"missing\.json: No such file"):
        HeadHistory.load(tmp_path / "missing.json")


def test_gates_are_probabilities_and_moments_are_moments():
    history = HeadHistory((AttentionSite("one", "enc-self", 0, 2),), {"one": (0, 1)})
    with pytest.raises(ArgumentError, match="gates of one: 7 is not a probability"):
        history.record(Moment(0, 0, "training"), {"gates": {"one": [0.5, 7.0]}})
    with pytest.raises(ArgumentError, match=r"moment must be a Moment\(step, epoch, stage\), not 3"):
        history.record(3, {"gates": {"one": [0.5, 1.0]}})
    assert history.record(Moment(0, 0, "training"), {"confidence": {"one": [0.5, 7.0]}}).moments
