"""The house is measured: what is counted is there."""

import importlib

import pytest
from pages import ROOT


@pytest.fixture
def house(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("house")


def test_files_names_and_imports_are_counted(house):
    found = house.sizes() | house.imports()
    assert found["lines"] > 50 * found["files"] > 5000 and found["public names at the root"] > 20
    internal, *of_them, public = (found[name] for name in house.IMPORTS)
    assert internal > sum(of_them) and min(of_them) > 0 < public


@pytest.mark.slow
def test_every_opening_of_a_model_is_counted(house):
    """A function that has another name now would be counted as never called."""
    assert all(count > 0 for count in house.opens().values())
