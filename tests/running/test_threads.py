"""One thread is used where several are slower, and only there."""

from types import SimpleNamespace

import pytest
import torch

from collab_heads.errors import CalibrationError
from collab_heads.running import threads
from collab_heads.running.threads import choose_threads, stored_threads
from families import FAMILIES

IDS = torch.arange(4, 44).view(20, 2)
QUICK, SLOW = 0.03, 0.06  # seconds of a pass


pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only models move."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(threads, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def waiting(clock, alone, together):
    """A model whose passes take so long, with one thread and with two, and the rows that it was given."""
    model, rows = FAMILIES["bert"].build().train(), []

    def wait(module, args, inputs):
        assert not module.training
        rows.append(len(inputs["input_ids"]))
        first = 9.0 * (len(rows) == 1)  # whatever it takes
        clock.now += first + (alone if torch.get_num_threads() == 1 else together)

    model.register_forward_pre_hook(wait, with_kwargs=True)
    return model, rows


def test_one_thread_where_two_wait_for_each_other(clock, warnings_logged):
    model, rows = waiting(clock, QUICK, SLOW)
    choose_threads(model, {"input_ids": IDS})
    assert torch.get_num_threads() == 1 and model.training
    assert rows == [8] * 7
    said = warnings_logged.text
    assert "one thread is used: 2 threads take 2.0 times as long" in said and "OMP_NUM_THREADS" in said


def test_two_where_they_are_quicker_once(clock, warnings_logged):
    model, rows = waiting(clock, SLOW, QUICK)
    choose_threads(model, {"input_ids": IDS})
    assert (torch.get_num_threads(), rows, warnings_logged.text) == (2, [8] * 3, "")


def test_a_pass_of_milliseconds_decides_nothing(clock):
    model, rows = waiting(clock, 0.0, SLOW)
    choose_threads(model, {"input_ids": IDS})
    assert torch.get_num_threads() == 2 and len(rows) == 3


def test_the_number_that_the_user_has_set_stays(clock, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    model, rows = waiting(clock, QUICK, SLOW)
    choose_threads(model, {"input_ids": IDS})
    assert torch.get_num_threads() == 2 and not rows


def test_a_batch_that_the_model_cannot_take_is_named(clock):
    model, _ = waiting(clock, QUICK, SLOW)
    with pytest.raises(CalibrationError, match="cannot take batch 0"):
        choose_threads(model, {"input_ids": IDS + 10**6})


@pytest.mark.parametrize("stored", (0, -1, True, "2", None, 2.0, 4097, [2]))
def test_a_stored_number_is_checked(stored):
    with pytest.raises(ValueError, match=r"threads is .*, not a number from 1 to 4,096"):
        stored_threads(stored)
