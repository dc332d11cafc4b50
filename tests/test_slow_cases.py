"""Slow tests are left out of the default run before they are built, and are there whenever they are asked for."""

from pathlib import Path

import pytest

pytest_plugins = ("pytester",)

SOME = """
import pytest

@pytest.fixture(params=("bert", "roberta"))
def name(request): return request.param

def test_fast(): pass
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.parametrize("case", (1, pytest.param(2, marks=pytest.mark.slow)))
def test_cases(case): pass
@pytest.mark.core
def test_siblings(name): pass
@pytest.mark.parametrize("case", [pytest.param(each, marks=pytest.mark.slow) for each in range(3)])
def test_slow_cases(case): pass
"""
ALL = "import pytest\npytestmark = pytest.mark.slow\ndef test_one(): pass\n"


@pytest.fixture
def collected(pytester, monkeypatch):
    """Returns what is collected, and how many cases were built to be dropped."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    pytester.makeconftest("pytest_plugins = ('slow_cases',)")
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    core\n")
    pytester.makepyfile(test_some=SOME, test_all=ALL)

    def collect(*arguments):
        items, record = pytester.inline_genitems(*arguments)
        dropped = [item for call in record.getcalls("pytest_deselected") for item in call.items]
        return {item.name for item in items if item not in dropped}, len(dropped)

    return collect


DEFAULT = ("-m", "not slow")
FAST = {"test_fast", "test_cases[1]", "test_siblings[bert]"}


def test_by_default_no_slow_case_is_built(collected):
    assert collected(*DEFAULT) == (FAST, 1)  # of a test whose cases are all slow, one is


@pytest.mark.parametrize("expression", ("slow or not slow", ""))
def test_all_are_there_if_they_are_asked_for(collected, expression):
    slow = {"test_slow", "test_cases[2]", "test_siblings[roberta]", "test_one"}
    slow |= {f"test_slow_cases[{case}]" for case in range(3)}
    assert collected("-m", expression) == (FAST | slow, 0)


def test_a_slow_test_that_is_named_is_found(collected):
    assert collected(*DEFAULT, "test_some.py::test_slow") == (set(), 1)
    assert collected("-m", "slow", "test_all.py") == ({"test_one"}, 0)
