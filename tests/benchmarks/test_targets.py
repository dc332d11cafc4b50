"""Every table of the documentation is made by one target of make, which stands on its page."""

import importlib
import re
import shutil
import subprocess

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


def test_a_target_writes_what_is_stored_with_flags_that_its_programs_have(targets):
    stored = {path.stem for path in (BENCHMARKS / "results").glob("*.json")}
    made = {record for name in targets.TARGETS for record in targets.results_of(name)}
    assert made - stored <= {"gpu"}  # which nobody has measured
    assert stored - made <= {"house"}  # no table shows it
    unknown = []
    for target in targets.TARGETS.values():
        for command in target.commands:
            program, *_ = command.split()
            code = (BENCHMARKS / program).read_text(encoding="utf-8")
            flags = re.findall(r"(?<= )--\w+", command)
            unknown += [command for flag in flags if f'add_argument("{flag}"' not in code.replace("\n        ", "")]
    assert unknown == []


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
