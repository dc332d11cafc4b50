"""The rows of the GLUE table: averages, and how far a setting ends from the original, by seed."""

import importlib
import json

import pytest
from pages import ROOT


def run(folder, before: float, after: float, first: str = "swapped") -> None:
    folder.mkdir(parents=True)
    stages = {first: {"accuracy": before}, "fine_tuned": {"accuracy": after}}
    results = {"stages": stages, "parameters": 1, "swap": {"mean_relative_error": 0.5, "sites": [{"dim": 64}]}}
    (folder / "all_results.json").write_text(json.dumps(results))


@pytest.fixture
def glue(monkeypatch):
    """The program."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("glue")


@pytest.fixture
def work(tmp_path):
    for task, ends in {
        "rte": ((0.60, 0.58), (0.62, 0.63), (0.61, 0.64)),
        "sst2": ((0.5, 0.5),) * 3,
        "wnli": ((0.3, 0.4),) * 3,
    }.items():
        for seed, (original, swapped) in enumerate(ends):
            run(tmp_path / f"{task}-{seed}-original", 0.59, original, "loaded")
            run(tmp_path / f"{task}-{seed}-64", 0.55, swapped)
    return tmp_path


def test_rows(glue, work):
    original, narrow = glue.rows_of(glue.runs_of(work), ["rte", "wnli", "sst2"], ["original", "64"], [0, 1, 2])
    assert original["rte"] == pytest.approx(59) and original["rte again"] == pytest.approx(61)
    assert narrow["average"] == pytest.approx(55) and narrow["average again"] == pytest.approx((61.6667 + 50) / 2)
    assert "difference" not in original
    assert narrow["wnli again"] == pytest.approx(40)  # and is in no average
    assert narrow["by seed"] == pytest.approx([-1, 0.5, 1.5])  # half of RTE's -2, +1, +3
    mean, half = 1 / 3, 4.302653 * 1.2583057 / 3**0.5  # Student's quantile of two degrees of freedom
    assert narrow["difference"] == pytest.approx(mean)
    assert narrow["interval"] == pytest.approx((mean - half, mean + half), abs=1e-4)


def test_a_seed_that_one_task_lacks_is_left_out(glue, work):
    for seed in (1, 2):
        (work / f"sst2-{seed}-64" / "all_results.json").unlink()
    _, narrow = glue.rows_of(glue.runs_of(work), ["rte", "sst2"], ["original", "64"], [0, 1, 2])
    assert narrow["gaps"]["sst2"] == {0: pytest.approx(0)} and "difference" not in narrow


def test_runs_of_the_stored_table_count_where_it_is_asked_for_and_there_are_none(glue, tmp_path):
    name = glue.run_name("rte", 42, "64 balanced")
    assert glue.runs_of(tmp_path) == {}
    stored = glue.runs_of(tmp_path, with_stored=True)
    assert stored[name]["stages"].keys() == {"loaded", "swapped", "fine_tuned"} and len(stored[name]["widths"]) == 6
    (row,) = glue.rows_of(stored, ["rte"], ["64 balanced"], [42])
    assert row["rte again"] == pytest.approx(100 * stored[name]["stages"]["fine_tuned"]["accuracy"])
    run(tmp_path / name, 0.1, 0.2)
    assert glue.runs_of(tmp_path, with_stored=True)[name]["stages"]["fine_tuned"] == {"accuracy": 0.2}
