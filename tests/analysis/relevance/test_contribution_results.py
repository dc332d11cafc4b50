"""Curves over sentences of unequal length and their errors, by hand; what is stored; sentences of one length."""

import json
import math
import statistics

import pytest
import torch
from heads_by_hand import EOS, STEPS, model_in
from model_sizes import EXACT64
from relevance_by_hand import labelled

from collab_heads.analysis import TokenContributions, token_contributions
from collab_heads.analysis.relevance.contribution_curve import (
    NORMAL_95,
    difference_and_error,
    mean_and_error,
    mean_curve,
)
from collab_heads.errors import ArgumentError, DataError

ROWS = [torch.tensor(row, dtype=torch.float64) for row in ([1.0, 2, 3, 4], [3.0, 5], [8.0, 2, 2])]


@pytest.fixture(scope="module")
def found():
    return token_contributions(model_in("marian"), [labelled("marian")], exclude=[EOS], keep_relevance=True)


def test_a_curve_is_a_mean_over_the_sentences_that_reach_a_position():
    curve = mean_curve(ROWS)
    assert curve.at.tolist() == [0, 1, 2, 3] and curve.counts.tolist() == [3, 3, 2, 1]
    assert curve.mean.tolist() == pytest.approx([4, 3, 2.5, 4])
    errors = [statistics.stdev(each) / math.sqrt(len(each)) for each in ([1, 3, 8], [2, 5, 2], [3, 2])]
    assert curve.error[:3].tolist() == pytest.approx(errors) and math.isnan(curve.error[3])
    low, high = curve.interval()
    assert low[0] == pytest.approx(4 - NORMAL_95 * errors[0]) and high[0] == pytest.approx(4 + NORMAL_95 * errors[0])
    assert mean_curve([torch.zeros(0, dtype=torch.float64), *ROWS]).counts.tolist() == [3, 3, 2, 1]


def test_parts_compare_sentences_of_all_lengths():
    """Four tokens in halves: 1 2 | 3 4; two: 3 | 5; three, the middle one in the second half: 8 | 2 2."""
    curve = mean_curve(ROWS, 2)
    assert curve.at.tolist() == [0.25, 0.75] and curve.counts.tolist() == [3, 3]
    assert curve.mean.tolist() == pytest.approx([(1.5 + 3 + 8) / 3, (3.5 + 5 + 2) / 3])
    few = mean_curve(ROWS[1:2], 4)  # two tokens in four parts: two of them are empty
    assert few.at.tolist() == [0.375, 0.875] and few.mean.tolist() == [3, 5]
    with pytest.raises(ArgumentError, match="parts 0 must be a whole number, 1 or more"):
        mean_curve(ROWS, 0)


def test_means_count_tokens_and_errors_count_sentences():
    mean, error = mean_and_error(ROWS)
    assert mean == pytest.approx(30 / 9)
    moves = [(float(row.sum()) - mean * len(row)) / 9 for row in ROWS]
    assert error == pytest.approx(math.sqrt(1.5 * sum(move**2 for move in moves)))
    same = [row[:1].expand(4) for row in ROWS]  # tokens that say the same count once
    assert mean_and_error(same)[1] == pytest.approx(mean_and_error([row[:1] for row in same])[1])
    assert math.isnan(mean_and_error(ROWS[:1])[1])


def test_the_error_of_a_difference_is_that_of_pairs():
    more = [row + 0.5 for row in ROWS]
    assert difference_and_error(more, ROWS) == pytest.approx((0.5, 0), abs=EXACT64)
    one, two = [row[:1] for row in ROWS], [row[1:2] for row in ROWS]
    mean, error = difference_and_error(one, two)
    assert (mean, error) == pytest.approx((1, statistics.stdev([-1, -2, 6]) / math.sqrt(3)))


def test_averages_and_curves_are_of_the_sentences(found):
    for measure in ("source", "source_entropy", "target_entropy"):
        rows = [getattr(sentence, measure) for sentence in found.sentences]
        assert found.average(measure)[0] == pytest.approx(float(torch.cat(rows).mean()))
        assert torch.equal(found.curve(measure).mean, mean_curve(rows).mean)
    assert found.curve("influence").counts.tolist() == [3] * 5 + [2] * 2 + [1] * 2
    assert found.tokens == sum(STEPS)
    with pytest.raises(ArgumentError, match="unknown measure 'influence'"):
        found.average("influence")
    with pytest.raises(ArgumentError, match="unknown measure 'sources'"):
        found.curve("sources")


def test_sentences_of_one_length(found):
    assert [len(each.source) for each in found.of_length(STEPS[1]).sentences] == [STEPS[1]]
    assert len(found.of_length(STEPS[0], source=9).sentences) == 1
    with pytest.raises(ArgumentError, match="no sentence of 4 generated tokens; there are sentences of 3, 5, 6"):
        found.of_length(4)
    with pytest.raises(ArgumentError, match="no sentence of 6 generated tokens and 5 source tokens"):
        found.of_length(6, source=5)


def test_what_is_stored_comes_back(found, tmp_path):
    for each in (found, found.without_relevance()):
        again = TokenContributions.load(each.save(tmp_path / "contributions.json"))
        assert again == each and again.names == found.names and str(again) == str(each)
    assert found != found.without_relevance()
    stored = json.loads((tmp_path / "contributions.json").read_text())
    assert stored["by_part"]["source"]["mean"] == found.curve("source", 10).mean.tolist()
    assert stored["averages"]["source"] == list(found.average("source")) and "relevance" not in stored["sentences"][0]


@pytest.mark.parametrize(
    "text, words",
    (
        ("", "not a record of the contributions of tokens"),
        ("[]", "not a record of the contributions of tokens"),
        ('{"version": 2}', "is of version 2; this package reads version 1"),
        ('{"version": 1, "sentences": [{}]}', "not a record of the contributions of tokens"),
    ),
)
def test_other_files_are_refused(text, words, tmp_path):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(DataError, match=words):
        TokenContributions.load(tmp_path / "file.json")
    with pytest.raises(DataError, match="No such file"):
        TokenContributions.load(tmp_path / "missing.json")


def test_an_example_is_the_sentence_of_middle_length(found):
    example = found.typical()
    assert len(example.said) == sorted(STEPS)[1] and example.names == ("source", "target prefix")
    assert torch.allclose(example.source.sum(1) + example.target.sum(1), torch.ones(5, dtype=torch.float64))
    assert found.without_relevance().typical() is None
