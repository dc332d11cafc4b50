"""The benchmark of engines: two runs at once keep the rows of both, and of models that neither measures."""

import importlib
import json
import sys

import pytest
from pages import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def program(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found, common = (importlib.import_module(name) for name in ("serving", "common"))
    for name in ("WORK", "RESULTS"):
        monkeypatch.setattr(common, name, tmp_path)
    monkeypatch.setattr(found, "RECORD", tmp_path / "serving.json")
    return found


def row(model, budget, seconds):
    made = {"model": model, "budget": budget, "steps": 0, "engine": "PyTorch", "int8": False, "seconds": 0.0}
    return made | {"megabytes": 4.0 * budget, "score": 80.0 * budget, "times": {"1 x 32": seconds}}


def test_two_runs_at_once_keep_the_rows_of_both(program, monkeypatch):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["serving.py", *arguments])
        program.main()
        found = json.loads(program.RECORD.read_text())
        return found["runs"].keys(), [(row["model"], row["budget"], row["time"]) for row in found["rows"]]

    def measure(name, arguments):
        if name == "minilm" and first:
            first.clear()
            run("gpt2")  # begins later, and ends earlier
        yield row(name, 1.0, 8.0)
        yield row(name, 0.5, seconds)

    monkeypatch.setattr(program, "measure", measure)
    first, seconds = [], 4.0
    assert run("marian") == ({"marian"}, [("marian", 1.0, "1.000"), ("marian", 0.5, "0.500")])
    first, seconds = [True], 2.0
    runs, rows = run("minilm")
    assert runs == {"marian", "minilm", "gpt2"}
    assert rows == [
        (name, *more)
        for name in ("minilm", "marian", "gpt2")
        for more in ((1.0, "1.000"), (0.5, "0.500" if name == "marian" else "0.250"))
    ]
    assert run("marian")[1] == [(name, *more) for name, *_ in rows[::2] for more in ((1.0, "1.000"), (0.5, "0.250"))]
