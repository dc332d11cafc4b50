"""Batches that are read several times, counted and cut."""

import pytest
import torch

from collab_heads.analysis.measures.sentences import Sentences
from collab_heads.errors import ArgumentError, CalibrationError


def batches():
    return [
        {"input_ids": torch.arange(6).view(3, 2), "labels": torch.arange(3), "factor": torch.tensor(2.0), "name": "a"},
        {"input_ids": torch.arange(4).view(2, 2), "labels": torch.arange(2)},
    ]


def test_they_are_counted_whenever_they_are_read():
    found = Sentences(batches())
    assert found.count == 0
    for _ in range(2):
        assert len(list(found)) == 2 and found.count == 5
    next(iter(found))
    assert found.count == 5  # a reading that was broken off does not count


@pytest.mark.parametrize("number, sizes", ((1, [1]), (3, [3]), (4, [3, 1]), (5, [3, 2]), (9, [3, 2])))
def test_the_first_ones(number, sizes):
    found = list(Sentences(batches()).first(number))
    assert [len(batch["input_ids"]) for batch in found] == sizes == [len(batch["labels"]) for batch in found]
    assert torch.equal(found[0]["input_ids"], torch.arange(6).view(3, 2)[:number])
    assert found[0]["factor"] == 2.0 and found[0]["name"] == "a"


@pytest.mark.parametrize(
    "number, kept", ((1, [4]), (2, [2, 4]), (3, [1, 3, 4]), (5, [0, 1, 2, 3, 4]), (9, [0, 1, 2, 3, 4]))
)
def test_some_evenly_spread(number, kept):
    """The first ones would be the longest where batches are ordered by length."""
    found = list(Sentences(batches()).spread(number))
    ids = torch.cat([batch["input_ids"] + 6 * ("name" not in batch) for batch in found])
    assert torch.equal(ids, torch.arange(10).view(5, 2)[kept])
    assert all(len(batch["labels"]) == len(batch["input_ids"]) for batch in found)
    assert all(batch["factor"] == 2.0 for batch in found if "name" in batch)


def test_what_can_be_read_once_is_refused():
    with pytest.raises(ArgumentError, match=r"generator, which can be read only once.*pass a list"):
        Sentences(batch for batch in batches())
    with pytest.raises(CalibrationError, match="empty"):
        list(Sentences([]))
    with pytest.raises(CalibrationError, match="batch 1 is a str"):
        list(Sentences([*batches()[:1], "x"]))
