"""Benchmarks keep their rows as they come, and measure the memory of their own process."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from pages import ROOT


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("common")


@pytest.fixture
def folders(common, tmp_path, monkeypatch):
    """Stored results, and the folder of unfinished runs."""
    for name in ("WORK", "RESULTS"):
        monkeypatch.setattr(common, name, tmp_path / name)
        (tmp_path / name).mkdir()
    monkeypatch.setattr(common, "machine", lambda: {"processor": "A", "instructions": "AVX2"})
    return tmp_path


def losses(store):
    return [row["loss"] for row in store.rows]


def test_rows_are_kept_and_found_again(common, folders):
    store = common.RowStore("some")
    assert store.rows == []
    store.add({"loss": 1.5})
    store.add({"loss": 2.5})
    assert common.RowStore("some").rows == store.rows and losses(store) == [1.5, 2.5]
    store.write([{"loss": 2.0}], {"loss": ".1f"})
    written = json.loads((folders / "RESULTS" / "some.json").read_text())
    assert written["rows"] == [{"loss": 2.0}] and written["each"] == store.rows


def test_a_new_machine_begins_with_the_stored_rows(common, folders):
    (folders / "RESULTS" / "some.json").write_text(json.dumps({"rows": [], "each": [{"loss": 1.5}]}))
    common.RowStore("some").add({"loss": 2.5})
    assert losses(common.RowStore("some")) == [1.5, 2.5]
    (folders / "WORK" / "some.jsonl").write_text("")  # to measure all again
    assert common.RowStore("some").rows == []


def test_rows_of_runs_at_the_same_time_are_all_there_the_newest_of_each(common, folders):
    stored = [{"model": "a", "loss": 1.5}, {"model": "b", "loss": 1.0}]
    (folders / "RESULTS" / "some.json").write_text(json.dumps({"rows": stored}))  # which are no means
    first, second = common.RowStore("some"), common.RowStore("some")
    second.add({"model": "c", "loss": 3.5})
    first.add({"model": "a", "loss": 2.5})
    for store in (first, second):
        rows = store.newest(lambda row: row["model"])
        assert [(row["model"], row["loss"]) for row in rows] == [("a", 2.5), ("b", 1.0), ("c", 3.5)]


def test_stored_rows_do_not_count_where_all_is_measured_again(common, folders, monkeypatch):
    (folders / "RESULTS" / "some.json").write_text(json.dumps({"rows": [], "each": [{"loss": 1.5}]}))
    monkeypatch.setenv("AGAIN", "1")
    common.RowStore("some").add({"loss": 2.5})
    assert losses(common.RowStore("some")) == [2.5]  # of another command of the same target


def test_a_program_that_is_tried_keeps_nothing(common, folders):
    (folders / "RESULTS" / "some.json").write_text(json.dumps({"each": [{"loss": 1.5}]}))
    store = common.RowStore("some", is_tried=True)
    store.add({"loss": 2.5})
    store.write([], {"loss": ".1f"})
    assert losses(store) == [2.5] and not list((folders / "WORK").iterdir())
    assert json.loads((folders / "RESULTS" / "some.json").read_text()) == {"each": [{"loss": 1.5}]}


def test_a_row_names_its_processor_and_older_ones_keep_that_of_their_results(common, folders):
    path = folders / "RESULTS" / "some.json"
    stored = {"machine": {"processor": "B"}, "versions": {"torch": "1.0"}}
    path.write_text(json.dumps(stored | {"each": [{"loss": 1.5}], "rows": []}))
    store = common.RowStore("some")
    store.add({"loss": 2.5})
    store.write([{"loss": 2.0}], {"loss": ".1f"})
    written = json.loads(path.read_text())
    assert written["each"] == [{"loss": 1.5}, {"loss": 2.5, "machine": "A; AVX2"}]
    assert {name: written[name] for name in stored} == stored
    store.rows.pop(0)  # the rest is of this machine
    store.save(store.rows)
    written = json.loads(path.read_text())
    assert written["machine"] == common.machine() and written["versions"] == common.versions()


def test_rows_that_ran_later_stand_beside_the_first_ones(common, folders):
    common.write("some", [{"loss": 1.5}])
    for note, loss in (("a second seed", 9.5), ("a third seed", 3.5), ("a second seed", 2.5)):
        common.write_again("some", [{"loss": loss}], note)
    written = json.loads((folders / "RESULTS" / "some.json").read_text())
    assert written["rows"] == [{"loss": 1.5}]
    assert [(each["note"], each["rows"]) for each in written["again"]] == [
        ("a second seed", [{"loss": 2.5}]),
        ("a third seed", [{"loss": 3.5}]),
    ]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system resets no peak of memory")
def test_the_peak_of_memory_begins_again(common):
    big = torch.ones(2**26)  # 256 MB
    before = common.memory_bytes("VmHWM")
    assert before > big.nbytes and common.memory_bytes("VmRSS") > big.nbytes
    del big
    common.reset_peak()
    assert common.memory_bytes("VmHWM") < before - 2**27


@pytest.mark.parametrize(
    ("text", "named"),
    (
        (
            "model\t\t: 1\ncpu family\t: 25\nmodel name\t: AMD EPYC\n\nmodel name\t: other",
            "AMD EPYC, cpu family 25, model 1",
        ),
        ("CPU part\t: 0xd0c\n", "aarch64"),  # ARM names no model
        (None, "aarch64"),
    ),
)
def test_a_record_says_which_processor_it_was(text, named, common, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "Path", lambda _: tmp_path / "cpuinfo")
    monkeypatch.setattr(common.platform, "processor", lambda: "")
    monkeypatch.setattr(common.platform, "machine", lambda: "aarch64")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    found = common.machine()
    assert found["processor"] == named and {"instructions", "cpus", "threads", "system"} <= found.keys()
