"""Progress bars are shown where somebody looks, one at a time; one place says so."""

import ast
import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from terminals import Terminal, shown
from transformers.utils import logging

import collab_heads
from collab_heads.base import progress
from collab_heads.base.progress import OPEN, one_bar, progress_bar, showing_bars


class Notebook(Terminal):
    __module__ = "ipykernel.iostream"

    def isatty(self):
        return False


class File(Terminal):
    def isatty(self):
        return False


@pytest.fixture
def terminal():
    with shown() as stream:
        yield stream


@pytest.mark.parametrize(("stream", "seen"), ((Terminal(), True), (Notebook(), True), (File(), False), (None, False)))
def test_bars_are_for_terminals_and_notebooks(stream, seen, monkeypatch):
    logging.enable_progress_bar()
    try:
        monkeypatch.setattr(sys, "stderr", stream)
        assert list(progress_bar([1, 2], desc="counting")) == [1, 2]
        with one_bar("call", (("steps", 1),)):
            assert list(progress_bar([1, 2], desc="steps")) == [1, 2]
    finally:
        logging.disable_progress_bar()
    assert stream is None or bool(stream.getvalue()) == seen
    assert not seen or stream.names == ["counting", "call"]


def test_the_switch_of_transformers_is_heard(terminal):
    logging.disable_progress_bar()
    assert list(progress_bar([1, 2], desc="counting")) == [1, 2]
    call()
    assert not terminal.getvalue()


def test_a_command_switches_all_bars_off_and_on_again(monkeypatch):
    logging.enable_progress_bar()
    for stream, show in ((Terminal(), False), (io.StringIO(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        with showing_bars(show):
            assert not logging.is_progress_bar_enabled()
        assert logging.is_progress_bar_enabled()
    monkeypatch.setattr(sys, "stderr", Terminal())
    with showing_bars(True):
        assert logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    with showing_bars(True):
        assert not logging.is_progress_bar_enabled()
    assert not logging.is_progress_bar_enabled()


@one_bar("call", (("first", 1), ("second", 2), ("third", 1)))
def call(phases=("first", "second", "third")):
    for phase in phases:
        for _ in progress_bar(range(4), desc=phase):
            assert list(progress_bar(range(3), desc="inner")) == [0, 1, 2]


def test_phases_share_one_bar(terminal):
    call()
    assert terminal.names == ["call"] and terminal.phases == ["first", "second", "third"]
    starts = {frame.split(", ")[1]: int(frame.split("%")[0][-3:]) for frame in terminal.frames if " 0/4" in frame}
    assert starts == {"first 0/4": 0, "second 0/4": 25, "third 0/4": 75}
    assert terminal.percentages == sorted(terminal.percentages) and terminal.percentages[-1] == 100
    assert "\n" not in terminal.getvalue() and terminal.getvalue().endswith("\r")  # the bar is removed


def test_phases_that_do_not_occur_take_no_room(terminal):
    call(["second", "third"])
    starts = {frame.split(", ")[1]: int(frame.split("%")[0][-3:]) for frame in terminal.frames if " 0/4" in frame}
    assert starts == {"second 0/4": 0, "third 0/4": 67} and terminal.percentages[-1] == 100


def test_a_phase_that_was_not_announced_is_named_all_the_same(terminal):
    call(["first", "other", "second"])
    assert terminal.phases == ["first", "other", "second"] and terminal.percentages[-1] == 100


def test_the_steps_of_a_loop_are_divided(terminal, monkeypatch):
    """Each loop inside takes half of what is left of its step."""
    seen = []
    monkeypatch.setattr("collab_heads.base.progress.Bar.move", lambda bar, share: seen.append(share))
    with one_bar("call", (("steps", 1),)):
        for _ in progress_bar(range(2), desc="steps"):
            for _ in range(2):
                list(progress_bar(range(2), desc="inner"))
    first = [0.0, 0.125, 0.25, 0.25, 0.25, 0.3125, 0.375, 0.375]  # where each loop is: at 0, after 1, 2, and its end
    assert seen[:9] == [0.0, *first] and seen[9] == 0.5 and seen[10:18] == [each + 0.5 for each in first]
    assert seen[-1] == 1.0


def test_a_call_is_a_phase_of_another(terminal):
    with one_bar("outer", (("call", 1), ("end", 1))):
        call()
        with progress_bar(desc="end", total=1):
            pass
    assert terminal.names == ["outer"] and terminal.phases == ["first", "second", "third", "end"]
    assert next(frame for frame in terminal.frames if "second" in frame).startswith("outer:  12%")


def test_a_loop_in_a_loop_is_its_text(terminal):
    for _ in progress_bar(range(2), desc="training"):
        list(progress_bar(range(3), desc="evaluating"))
    assert terminal.names == ["training"]
    assert any("0/2" in frame and "evaluating 0/3" in frame for frame in terminal.frames)
    assert "evaluating" not in terminal.frames[-1] and "2/2" in terminal.frames[-1]


def test_numbers_stand_beside_the_phase(terminal):
    with one_bar("call", (("steps", 1),)), progress_bar(total=2, desc="steps") as loop:
        loop.show("error 0.5")
        loop.update(2)
        loop.advance(now=True)
    assert any(frame.endswith("steps 2/2, error 0.5") for frame in terminal.frames)


def test_an_error_closes_the_bar(terminal):
    for broken in (one_bar("call", (("steps", 1),)), one_bar("call")):
        with pytest.raises(ZeroDivisionError), broken:
            for each in progress_bar(range(3), desc="steps"):
                1 / (1 - each)
        assert OPEN.get() is None and logging.is_progress_bar_enabled()
    assert 100 not in terminal.percentages and terminal.getvalue().endswith("\r")
    with pytest.raises(ZeroDivisionError):
        for each in progress_bar(range(3), desc="steps"):
            1 / (1 - each)
    assert OPEN.get() is None
    call()
    assert terminal.names == ["call", "steps"] and terminal.percentages[-1] == 100


def test_nothing_is_drawn_before_the_first_phase(terminal):
    with pytest.raises(ValueError), one_bar("call", (("steps", 1),)):
        raise ValueError("a wrong argument")
    assert not terminal.getvalue()


def test_bars_of_others_wait(terminal):
    """Loading a model inside a call would draw a bar below ours."""
    with one_bar("call", (("steps", 1),)):
        for _ in progress_bar(range(2), desc="steps"):
            assert not logging.is_progress_bar_enabled()
    assert logging.is_progress_bar_enabled()


def test_what_is_hidden_hides_what_is_inside(terminal):
    with one_bar("call", (("steps", 1),), disable=True):
        assert list(progress_bar(range(2), desc="steps")) == [0, 1]
    for _ in progress_bar(range(2), desc="steps", disable=True):
        list(progress_bar(range(2), desc="inner"))
    with one_bar("seen", (("steps", 1),)):
        for _ in progress_bar(range(2), desc="hidden", disable=True):
            list(progress_bar(range(2), desc="inner"))
    assert not terminal.getvalue()


def test_the_length_need_not_be_known(terminal):
    with one_bar("call", (("steps", 1),)):
        assert len(list(progress_bar(iter(range(5)), desc="steps"))) == 5
    assert terminal.phases == ["steps"] and terminal.percentages[-1] == 100


def test_nothing_else_draws_bars():
    """Modules that print beside bars use `tqdm.write`."""
    drawn = []
    for file in Path(collab_heads.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            inner = [] if isinstance(node, ast.Attribute) else ast.iter_child_nodes(node)
            drawn += [file.name for each in inner if isinstance(each, ast.Name) and each.id == "tqdm"]
    assert set(drawn) == {"progress.py"}


def written(monkeypatch, stream, work, *, show=True):
    """Return the lines that a command writes while it works, one every twentieth of a second."""
    monkeypatch.setattr(progress, "SECONDS", 0.05)
    monkeypatch.setattr(sys, "stderr", stream)
    before = logging.is_progress_bar_enabled()
    try:
        with showing_bars(show):
            work(stream)
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()
    return stream.getvalue().splitlines()


def wait_for(stream, text):
    deadline = time.monotonic() + 60
    while text not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)


def two_phases(stream):
    with one_bar("call", (("first", 1), ("second", 3))):
        for phase in ("first", "second"):
            with progress_bar(desc=phase, total=2) as steps:
                steps.update()
                wait_for(stream, f"{phase} 1/2")


def test_a_command_writes_lines_where_nobody_watches(monkeypatch):
    lines = written(monkeypatch, File(), two_phases)
    assert all(
        re.fullmatch(r"call: \d+ %, \d\d:\d\d so far, about \S+ to go, (first|second) \d/2", each) for each in lines
    )
    shares = [(each.split(", ")[-1], each.split(",")[0]) for each in lines]
    assert ("first 1/2", "call: 12 %") in shares and ("second 1/2", "call: 62 %") in shares


def test_a_loop_writes_lines_too_and_a_quiet_command_none(monkeypatch):
    def loop(stream):
        with progress_bar(desc="counting", total=4, leave=True) as steps:
            steps.update()
            wait_for(stream, "25 %")

    lines = written(monkeypatch, File(), loop)
    assert lines and all(each.startswith("counting: 25 %") for each in lines if "0 %" not in each)
    monkeypatch.setattr(progress.Lines, "write_lines", lambda bar: pytest.fail("a line is written"))
    assert written(monkeypatch, File(), lambda stream: list(progress_bar(range(3), desc="counting")), show=False) == []
    assert list(progress_bar(range(2), desc="counting")) == [0, 1]  # outside of a command


WATCHED = """
from collab_heads.base import progress

progress.is_watched = lambda: True
list(progress.progress_bar(range(3), desc="counting"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("value", "is_drawn"), (("", True), ("1", False)))
def test_the_environment_hides_bars(value, is_drawn):
    """tqdm reads TQDM_DISABLE when it is imported: only a new process shows what it does."""
    given = {name: text for name, text in os.environ.items() if name != "TQDM_DISABLE"}
    given |= {"TQDM_DISABLE": value} if value else {}
    done = subprocess.run([sys.executable, "-c", WATCHED], env=given, capture_output=True, text=True, check=True)
    assert ("counting" in done.stderr) == is_drawn
