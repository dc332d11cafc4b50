"""Every table of the documentation is made by one target of make, which stands on its page."""

import argparse
import ast
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys

import pytest
from pages import PAGES, ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("tables")


@pytest.fixture
def targets(tables):
    return importlib.import_module("targets")


def test_every_stored_result_that_a_table_shows_has_one_target_that_a_page_names(tables, targets):
    pages = "".join(page.text for page in PAGES.values())
    used, wrong = set(), {}
    for make in tables.TABLES.values():
        tables.USED.clear()
        make()
        used |= tables.USED
    for record in used:
        found = [name for name in targets.TARGETS if record in targets.results_of(name)]
        if len(found) != 1 or f"`make bench-{found[0]}`: {targets.TARGETS[found[0]].takes}." not in pages:
            wrong[record] = found
    assert len(used) > 40 and wrong == {}


def test_a_page_names_a_target_once_under_its_table(tables):
    text = "<!-- table: values -->\n<!-- end -->\n\n<!-- table: values -->\n<!-- end -->\n"
    first, second = re.findall(r"<!-- table.*?<!-- end -->", tables.written(text), flags=re.DOTALL)
    assert "\n\n`make bench-values`: not timed.\n\n<!-- end -->" in first and "make bench" not in second
    assert tables.written(tables.written(text)) == tables.written(text)


def test_a_target_writes_what_is_stored(targets):
    stored = {path.stem for path in (BENCHMARKS / "results").glob("*.json")}
    made = {record for name in targets.TARGETS for record in targets.results_of(name)}
    assert made - stored <= {"gpu"}  # which nobody has measured
    assert stored - made <= {"house"}  # no table shows it


def test_a_program_imports_what_the_library_has(tables):
    missing = []
    for path in BENCHMARKS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ("collab_heads", "common"):
                missing += [f"{path.name}: {node.module}.{each.name}" for each in node.names if not has(node, each)]
    assert missing == []


def has(node, imported):
    """Return True if a module has a name, or a module of that name."""
    found, name = importlib.import_module(node.module), f"{node.module}.{imported.name}"
    return hasattr(found, imported.name) or (hasattr(found, "__path__") and importlib.util.find_spec(name) is not None)


class Parsed(Exception):
    """A parser took the arguments: the program does not go on."""


PROGRAMS = sorted(path.name for path in BENCHMARKS.glob("*.py"))


@pytest.fixture
def parser_alone(tables, monkeypatch):
    """Programs end where their arguments are parsed."""
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, *given):
        parse(self, *given)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_takes_the_arguments_of_its_targets(program, targets, parser_alone, monkeypatch):
    tries = importlib.import_module("tries")
    given = [*(target.commands for target in targets.TARGETS.values()), *tries.TRIES.values()]
    commands = [command for each in given for command in each if command.split()[0] == program]
    try:
        module = importlib.import_module(program.removesuffix(".py"))
    except SystemExit as missing:  # says so in a line
        pytest.skip(str(missing))
    constants = [name for of, _, name in (each.partition(".") for each in tries.SMALLER) if of == module.__name__]
    assert [name for name in constants if not hasattr(module, name)] == []
    has_parser = "ArgumentParser(" in (BENCHMARKS / program).read_text(encoding="utf-8")
    for command in commands if has_parser else ():
        monkeypatch.setattr(sys, "argv", targets.filled(command, {"SMOLLM2": "smollm2", "MPNET": "mpnet"}))
        with pytest.raises(Parsed):
            module.main()
    assert has_parser or all(command == program for command in commands)


def test_every_program_of_a_target_is_tried(targets):
    tries = importlib.import_module("tries")
    programs = {command.split()[0] for target in targets.TARGETS.values() for command in target.commands}
    tried = {command.split()[0] for commands in tries.TRIES.values() for command in commands}
    assert programs == tried and tries.TRIES.keys() <= targets.TARGETS.keys()


def test_folders_are_filled_in_or_asked_for(targets):
    known = {"SMOLLM2": "/a b", "WORK": "/w"}
    assert targets.filled("x.py $SMOLLM2 'step 1=$WORK/c'", known) == ["x.py", "/a b", "step 1=/w/c"]
    with pytest.raises(SystemExit, match="SMOLLM2=FOLDER"):
        targets.filled("x.py $SMOLLM2", {})


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_knows_every_target(targets):
    asked = ["make", "-n", "-o", ".venv/.bench", *(f"bench-{name}" for name in targets.TARGETS)]
    printed = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    run = re.findall(r"python benchmarks/targets\.py (\S+)$", printed, flags=re.MULTILINE)
    assert run == list(targets.TARGETS)
    alone = subprocess.run(["make", "-n", "bench"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    run = re.findall(r"python benchmarks/targets\.py (\S+)$", alone, flags=re.MULTILINE)
    assert run == [name for name, target in targets.TARGETS.items() if target.takes == targets.TOGETHER]
