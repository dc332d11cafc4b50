"""The benchmark of images: its split, and runs that are not repeated."""

import importlib
import json

import pytest
from pages import ROOT


@pytest.fixture
def digits(monkeypatch):
    """The program."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("digits")


@pytest.mark.slow
def test_no_digit_is_in_both_splits_and_every_class_in_each(digits, tmp_path):
    _, train, _, validation = digits.write_digits(tmp_path)
    assert (train, validation) == (str(tmp_path / "train"), str(tmp_path / "validation"))
    names = {split: {path.name for path in (tmp_path / split).glob("*/*.png")} for split in ("train", "validation")}
    assert [len(each) for each in names.values()] == [1197, 600]
    assert not names["train"] & names["validation"]
    for split in names:
        assert {path.name for path in (tmp_path / split).iterdir()} == set("0123456789")


def test_complete_runs_are_taken_as_they_are_but_not_under_other_flags(digits, tmp_path, monkeypatch):
    asked = []

    def script(flags):
        asked.append(flags)
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "all_results.json").write_text(json.dumps({"count": len(asked)}))

    monkeypatch.setattr(digits.run_image_classification, "main", script)
    counts = [digits.run(tmp_path / "run", flags)["count"] for flags in (["--a"], ["--a"], ["--b"], ["--b"])]
    assert counts == [1, 1, 2, 2]
    assert asked[0] == ["--a", "--output_dir", str(tmp_path / "run"), "--overwrite_output_dir"]
