"""Which examples are kept away from the fits."""

import pytest
import torch

from collab_heads.compression.held_out import EVERY, hold_out
from collab_heads.errors import CalibrationError


def batch(start, count):
    return {"input_ids": torch.arange(start, start + count)[:, None], "n": 3}


def numbers(batches):
    return [int(row) for batch in batches for row in batch["input_ids"]]


def test_one_example_of_eight_in_whatever_batches():
    for sizes in ((40,), (3, 3, 3, 3, 3, 25), (1,) * 40):
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        fitted, held = hold_out(batch(start, size) for start, size in zip(starts, sizes, strict=True))
        assert numbers(held) == list(range(EVERY - 1, 40, EVERY))
        assert sorted(numbers(fitted) + numbers(held)) == list(range(40))
        assert all(part["n"] == 3 for part in [*fitted, *held])


def test_few_examples():
    fitted, held = hold_out([batch(0, 3)])
    assert (numbers(fitted), numbers(held)) == ([0, 1], [2])
    fitted, held = hold_out([batch(0, 1), batch(1, 1)])
    assert (numbers(fitted), numbers(held)) == ([0], [1])
    fitted, held = hold_out([batch(0, 1)])
    assert (numbers(fitted), numbers(held)) == ([0], [0])


def test_batches_that_cannot_be_divided_stay_whole():
    whole = [{"input_ids": torch.zeros(2, 3), "positions": torch.zeros(5), "i": i} for i in range(9)]
    fitted, held = hold_out(whole)
    assert [each["i"] for each in held] == [7]
    assert [each["i"] for each in fitted] == [0, 1, 2, 3, 4, 5, 6, 8]


def test_what_is_no_batch_is_refused():
    with pytest.raises(CalibrationError, match="calibration is empty"):
        hold_out([])
    with pytest.raises(CalibrationError, match="holds no examples"):
        hold_out([batch(0, 0)])
