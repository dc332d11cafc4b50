"""Progress bars are shown where somebody looks, and one place says so."""

import io
import sys

import pytest
from transformers.utils import logging

from collab_heads.base.display import progress_bar, showing_bars


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Notebook(io.StringIO):
    __module__ = "ipykernel.iostream"


@pytest.fixture
def enabled():
    logging.enable_progress_bar()
    yield
    logging.disable_progress_bar()  # as for all tests


def shown(stream, monkeypatch, **options):
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress_bar([1, 2], desc="counting", **options)) == [1, 2]
    return "counting" in stream.getvalue()


def test_bars_are_for_terminals_and_notebooks(enabled, monkeypatch):
    assert shown(Terminal(), monkeypatch) and shown(Notebook(), monkeypatch)
    assert not shown(io.StringIO(), monkeypatch)
    assert not shown(Terminal(), monkeypatch, disable=True)


def test_the_switch_of_transformers_is_heard(enabled, monkeypatch):
    logging.disable_progress_bar()
    assert not shown(Terminal(), monkeypatch)


def test_a_command_switches_all_bars_off_and_on_again(enabled, monkeypatch):
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


def test_nothing_else_draws_bars():
    """Modules that print beside bars use `tqdm.write`."""
    import ast
    from pathlib import Path

    import collab_heads

    drawn = []
    for file in Path(collab_heads.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "tqdm":
                drawn.append(file.name)
    assert drawn == ["display.py"]
