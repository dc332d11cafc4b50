"""What the table of claims computes from stored results."""

import importlib

import pytest
from pages import ROOT


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("shown.figures")


@pytest.mark.parametrize(
    "difference, half, bound, needed",
    [(0.3, 0.29, 0.0, "1,900"), (0.3, 0.59, 0.0, "7,800"), (-0.1, 0.39, 0.2, "3,500"), (0.1, 0.19, 0.3, "1,900")],
)
def test_sentences_that_would_exclude_a_difference(difference, half, bound, needed, figures, monkeypatch):
    """An interval that would just touch it: the width goes with the root of the number of sentences."""
    found = {"difference": difference, "interval": [difference - half, difference + half]}
    monkeypatch.setattr(figures, "row", lambda name, **wanted: found)
    assert figures.sentences_needed("nmt_risk", "risk", "minimum risk", bound) == needed


def test_gains_of_many_seeds_have_an_interval(figures, monkeypatch):
    rows = [
        {"what": what, "mixing": mixing, "R": 16, "accuracies": [90.0 + gain * seed % 3 for seed in range(count)]}
        for what, count in (("born", 3), ("longer", 10))
        for mixing, gain in (("shared", 2), ("per_head", 1))
    ]
    monkeypatch.setattr(figures, "rows_of", lambda name: rows)
    few, many = figures.born_digits().split("; ")
    assert few == "456 steps: +0.00, +1.00, -1.00 points"
    assert many == "912 steps: +0.00 points (-0.58 to +0.58), 10 seeds"
