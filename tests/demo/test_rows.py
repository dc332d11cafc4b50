"""A row of a demo is repeated by the command that stands beside it."""

import sys

import pytest

import run_glue
from collab_heads.demo.rows import chosen, repeating
from collab_heads.errors import ArgumentError

NAMES = ["original", "one", "two"]


def test_the_first_row_is_always_run():
    assert chosen(NAMES, None) == NAMES
    assert chosen(NAMES, 1) == ["original"] and chosen(NAMES, 3) == ["original", "two"]
    with pytest.raises(ArgumentError, match="--demo 4: its rows are 1 original, 2 one, 3 two"):
        chosen(NAMES, 4)


@pytest.mark.parametrize(
    ("typed", "said"),
    (
        ("python -c pass", "python run_glue.py --demo 2"),
        (".venv/bin/python run_glue.py --demo", ".venv/bin/python run_glue.py --demo 2"),
        ("python run_glue.py --quiet --demo 3 --seed 1", "python run_glue.py --demo 2"),
        ("python -m collab_heads glue --json --demo", "python -m collab_heads glue --demo 2"),
    ),
)
def test_the_command_begins_as_it_was_typed(typed, said, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", typed.split())
    assert repeating(NAMES, "one", "run_glue.py") == said


def test_a_command_on_the_path_needs_no_python(monkeypatch, tmp_path):
    command = tmp_path / "collab-heads"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "orig_argv", ["/x/python", str(command), "glue", "--demo"])
    assert repeating(NAMES, "two", "run_glue.py") == f"/x/python {command} glue --demo 3"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert repeating(NAMES, "two", "run_glue.py") == "collab-heads glue --demo 3"


@pytest.mark.parametrize("row", ("0", "-1", "shared"))
def test_a_row_is_a_number(row):
    with pytest.raises(ArgumentError, match="--demo"):
        run_glue.parse(["--demo", row])
    assert run_glue.parse(["--demo", "2"]).demo == 2
