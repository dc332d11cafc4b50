"""Slow tests are neither read nor built by default: most of them would be dropped again, after seconds of processor.

A file whose tests are all slow says `pytestmark = pytest.mark.slow`.
"""

import inspect
import re

import pytest

from families import is_left_to_slow

ALL_SLOW = re.compile(r"^pytestmark = \[?pytest\.mark\.slow\b", re.MULTILINE)


def slow(*cases):
    """Return the cases of a parametrisation, each a value or a tuple of several, as slow ones."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def leaves_slow_out(config):
    """Return True if slow tests are neither read nor built: by default, unless tests are named one by one."""
    return config.option.markexpr == "not slow" and not any("::" in argument for argument in config.args)


def pytest_ignore_collect(collection_path, config):
    if collection_path.suffix == ".py" and leaves_slow_out(config):
        return ALL_SLOW.search(collection_path.read_text(encoding="utf-8")) is not None or None


def pytest_pycollect_makeitem(collector, obj):
    if inspect.isfunction(obj) and is_slow(getattr(obj, "pytestmark", ())) and leaves_slow_out(collector.config):
        return []


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    """Build no slow case of a test, or one, to be deselected, if all are slow."""
    yield
    if leaves_slow_out(metafunc.config):
        core, calls = metafunc.definition.get_closest_marker("core") is not None, metafunc._calls
        fast = (call for call in calls if not is_slow(call.marks))
        metafunc._calls = [call for call in fast if not is_left_to_slow(call.params.values(), core=core)] or calls[:1]


def is_slow(marks):
    return any(mark.name == "slow" for mark in marks)
