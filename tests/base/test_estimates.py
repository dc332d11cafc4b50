"""A line before a long work says how long it will take; short works, functions and what is not known are silent."""

import copy
import logging

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel

from collab_heads import analyze_heads, compress, distill, plan, prune_heads
from collab_heads.base import estimates
from collab_heads.base.estimates import Estimate, in_words, is_of, say, work
from collab_heads.base.progress import showing_bars
from collab_heads.errors import CalibrationError
from collab_heads.running.speed import measure_speed

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 100,
}


@pytest.fixture
def no_least(monkeypatch):
    """Also short works have a line."""
    monkeypatch.setattr(estimates, "LEAST", 0.0)


def bert():
    torch.manual_seed(0)
    return BertModel(BertConfig(**SIZES)).eval()


def batches(rows=16):
    ids = torch.randint(5, 99, (rows, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[: rows // 2, 6:] = 0
    return [{"input_ids": ids, "attention_mask": mask}] * 2


def lines(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if ": about" in line]


@pytest.mark.slow
@pytest.mark.usefixtures("no_least")
def test_commands_write_one_line_and_functions_none(capsys):
    original = bert()
    for call, name in (
        (lambda model: compress(model, batches(), 0.5, refine_steps=1), "compress"),
        (lambda model: plan(model, batches(), refine_steps=0), "plan"),
        (lambda model: distill(model, original, batches(), 2), "distill"),
    ):
        for shown in (True, False):
            model = copy.deepcopy(original)
            prune_heads(model, heads={"enc-self": [[0], []]})
            with showing_bars(shown):
                call(model)
            found = lines(capsys)
            assert len(found) == shown
            assert not shown or (found[0].startswith(f"{name}: about 0 seconds on ") and "GB of memory" in found[0])


@pytest.mark.usefixtures("no_least")
def test_an_analysis_says_only_its_time(capsys):
    with showing_bars(True):
        analyze_heads(bert(), batches(), parts=["statistics", "worth"], exclude=[])
        (line,) = lines(capsys)
        assert line.startswith("analyze: about 0 seconds on ") and "GB" not in line
        analyze_heads(bert(), batches(), parts=["ablation"], evaluate=lambda model: 1.0, exclude=[])
        analyze_heads(bert(), DataLoader(batches(), batch_size=None), parts=["statistics"], exclude=[])
        assert not lines(capsys)


@pytest.mark.usefixtures("no_least")
@pytest.mark.parametrize("options", [{"max_error": 0.5}, {"budget": 0.5, "bits": 8}])
def test_what_is_not_known_is_not_said(options, capsys):
    with showing_bars(True):
        compress(bert(), batches(), refine_steps=0, **options)
    assert not lines(capsys)


@pytest.mark.usefixtures("no_least")
def test_functions_log_it_where_verbosity_is_info(caplog):
    with caplog.at_level(logging.INFO, logger="transformers.collab_heads"):
        plan(bert(), batches(), refine_steps=0)
    assert [each.message for each in caplog.records if each.message.startswith("plan: about")]


def test_the_parts_of_a_work_add_up_and_are_said_once(capsys):
    def part(seconds, memory):
        return lambda: Estimate(seconds, memory, 2)

    with showing_bars(True):
        with work("all", part(200, 1e9)), work("inner"):
            say(part(40, 3e9))
            say(part(40, 3e9))
        with work("short"):
            say(part(9, 0))
        with work("unknown", lambda: None):
            say(part(100, 0))
        say(part(100, 0))  # nothing is open
    (line,) = lines(capsys)
    held = float(line.split("and ")[1].split(" GB")[0])
    assert line.startswith("all: about 4 minutes on 2 threads") and held == pytest.approx(
        3 + estimates.held_bytes() / 1e9, abs=0.1
    )
    assert [in_words(each) for each in (38, 89, 100, 5300, 9000)] == [
        "40 seconds", "90 seconds", "2 minutes", "88 minutes", "2.5 hours",
    ]  # fmt: skip


def test_a_work_is_known_by_its_name_and_those_of_its_open_parts():
    with work("shrink"):
        assert is_of("shrink") and not is_of("compress")
        with pytest.raises(CalibrationError), work("compress"):
            assert is_of("shrink") and is_of("compress")
            raise CalibrationError("of the work")
        assert not is_of("compress")
    assert not is_of("shrink")


def test_an_error_is_left_to_the_work(capsys, monkeypatch):
    def fails():
        raise CalibrationError("of the estimate")

    with showing_bars(True), work("all"):
        say(fails)
    assert not lines(capsys)


def test_the_time_of_a_pass_counts_no_padding(monkeypatch):
    turns = iter(range(0, 1000, 2))
    monkeypatch.setattr("collab_heads.running.speed.time.perf_counter", lambda: float(next(turns)))
    speed = measure_speed(bert(), batches())
    # each row of 12 or 6 positions; all 144 are one portion, and each pass takes 2 s of this clock
    assert (speed.positions, speed.rows, speed.batches, speed.longest) == (288, 32, 2, 12)
    assert speed.seconds == 2.0 * 288 / 144
    layers = (
        2 * (4 * 32 * 32 + 2 * 32 * 64) * 16 * 12
    )  # products of the projections, padding within the portion included
    assert layers < 2.0 / speed.product < 1.5 * layers
    assert measure_speed(bert(), [{**batches()[0], "more": object()}]) is None
