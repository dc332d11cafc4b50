"""Which slow tests CI runs: those of what changed, then all others in turn, each until its time is over.

    python -m pytest -n 2 --maxschedchunk 8 -m slow --slow_minutes 20 tests

What changed is what the commits of the last hours and the work tree say; a file of the package and its tests have the
same name. Each list begins at a place that moves with every commit: what one run leaves out, others reach.
"""

import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeVar

import pytest

ROOT = Path(__file__).parents[1]
HOURS = 4  # longer than it takes to make what is submitted at once
FOR_CHANGED = 0.5  # the part of the time that tests of what changed may take: the others have their turn in any case
STEP = 0.618  # the golden ratio: places so far from each other do not meet again for long
LEFT_OUT = "the time for slow tests is over"
STARTED = time.monotonic()
# what has tests of another name -> these
OTHERS = {
    "README.md": r"^tests/test_(readme|docs)\.py",
    "docs/": r"^tests/test_docs\.py",
    "notebooks/": r"^tests/test_notebooks\.py",
    "hatch_build.py": r"^tests/test_packaging\.py",
    "pyproject.toml": r"^tests/test_packaging\.py",
    "run_glue.py": r"^tests/training/end_to_end/",
    "run_translation.py": r"^tests/training/end_to_end/",
    "examples/": r"^tests/training/end_to_end/",
}
Item = TypeVar("Item")


def pytest_addoption(parser):
    parser.addoption("--slow_minutes", type=float, help="run slow tests for so long, those of what changed first")


@pytest.hookimpl(trylast=True)  # after `-m slow`
def pytest_collection_modifyitems(config, items):
    if config.getoption("slow_minutes") is not None:
        touched = touching(changed_files(ROOT))
        for item in items:
            item.is_touched = bool(touched(item.nodeid))
        items[:] = in_turn(items, [item.is_touched for item in items], commits(ROOT))


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item):
    minutes = item.config.getoption("slow_minutes")
    if minutes is not None and time.monotonic() > STARTED + 60 * minutes * (FOR_CHANGED if item.is_touched else 1):
        pytest.skip(LEFT_OUT)


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("slow_minutes") is None:
        return
    reports = [each for found in terminalreporter.stats.values() for each in found if hasattr(each, "duration")]
    left_out = {each.nodeid for each in reports if each.skipped and LEFT_OUT in str(each.longrepr)}
    run = {each.nodeid for each in reports} - left_out
    changed = changed_files(ROOT)
    touched = touching(changed)
    terminalreporter.section("slow tests: what was run")
    for what, among in (
        (f"of {len(changed)} changed files", [name for name in run | left_out if touched(name)]),
        (f"of all others, place {place(commits(ROOT)):.2f}", [name for name in run | left_out if not touched(name)]),
    ):
        terminalreporter.write_line(f"{what}: {len(run & set(among))} of {len(among)} tests")
    tests, seconds = Counter(map(file_of, run)), Counter()
    for each in reports:
        seconds[file_of(each.nodeid)] += each.duration
    for name, taken in seconds.most_common():
        if name in tests:
            terminalreporter.write_line(f"{taken:8.1f} s {tests[name]:5d} tests  {name}")


def file_of(nodeid: str) -> str:
    """The file of a test."""
    return nodeid.partition("::")[0]


def in_turn(items: Sequence[Item], touched: Sequence[bool], count: int) -> list[Item]:
    """The items that are touched, then the others, each in their order from a place on that `count` moves."""
    ordered = []
    for part in (True, False):
        found = [item for item, is_touched in zip(items, touched, strict=True) if is_touched is part]
        start = int(place(count) * len(found))
        ordered += found[start:] + found[:start]
    return ordered


def place(count: int) -> float:
    """Where a run begins, between 0 and 1."""
    return count * STEP % 1


def touching(changed: Iterable[str]):
    """The function that finds out whether the name of a test is that of a test of one of these files."""
    patterns = {pattern for path in changed if (pattern := pattern_of(path))}
    return re.compile("|".join(f"(?:{pattern})" for pattern in sorted(patterns)) or "(?!)").search


def pattern_of(path: str) -> str | None:
    """The pattern of the names of the tests of a file; None if no path says which they are."""
    for beginning, pattern in OTHERS.items():
        if path.startswith(beginning):
            return pattern
    (top, *folders), stem = PurePosixPath(path).parent.parts or ("",), PurePosixPath(path).stem
    if top == "adapters":
        return rf"[\[-](?:{'|'.join(map(re.escape, model_types(stem)))})[\]-]"
    if top == "tests":
        return f"^{re.escape(path)}::" if stem.startswith("test_") else folder_pattern(folders)
    if top == "benchmarks":
        folders = ["benchmarks"]
    elif top != "collab_heads":
        return None
    named = rf"test_{re.escape(stem)}(?:_\w+)?\.py"
    if any(re.fullmatch(named, file.name) for file in ROOT.joinpath("tests", *folders).glob("test_*.py")):
        return f"^{re.escape('/'.join(['tests', *folders]))}/{named}::"
    return folder_pattern(folders)


def folder_pattern(folders: Sequence[str]) -> str | None:
    """The pattern of all tests of the innermost of these folders that has tests."""
    while folders and not ROOT.joinpath("tests", *folders).is_dir():
        folders = folders[:-1]
    return f"^{re.escape('/'.join(['tests', *folders]))}/" if folders else None


def model_types(adapter: str) -> list[str]:
    """The types of model that a file of adapters/ serves; its own name where it serves none."""
    from collab_heads.contract.registry import all_adapters

    module = f"collab_heads.adapters.{adapter}"
    found = [each for each, made in all_adapters().items() if type(made).__module__ == module]
    return [adapter, *found]


def changed_files(root: Path) -> list[str]:
    """The files that the commits of the last hours before the last one changed, and that differ from it now."""
    last = git(root, "log", "-1", "--format=%ct")
    if not last:
        return []
    logged = git(root, "log", f"--since={int(last[0]) - 3600 * HOURS}", "--name-only", "--format=")
    return sorted({*logged, *git(root, "diff", "--name-only", "HEAD")} - {""})


def commits(root: Path) -> int:
    """How many commits lead to the last one."""
    return int(next(iter(git(root, "rev-list", "--count", "HEAD")), 0))


def git(root: Path, *arguments: str) -> list[str]:
    """The lines that git prints; none where there is no repository."""
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True).stdout.splitlines()
