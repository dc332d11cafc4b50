"""CI's slow tests: those of what changed come first, the others take turns, none starts after its time is over."""

import subprocess
import time
from pathlib import Path

import pytest
import slow_share
from slow_share import LEFT_OUT, changed_files, commits, in_turn, pattern_of, place, touching

TESTS = Path(__file__).parent
pytest_plugins = ("pytester",)


@pytest.mark.parametrize(
    "changed, touched, untouched",
    (
        ("collab_heads/heads/prune.py", "tests/heads/test_prune.py::test_x[bert]", "tests/heads/test_fold.py::test_x"),
        ("collab_heads/heads/fold.py", "tests/heads/test_fold_narrow.py::test_x", "tests/heads/test_prune.py::test_x"),
        ("collab_heads/base/extras.py", "tests/base/test_extras.py::test_x", "tests/test_export.py::test_x"),
        (
            "collab_heads/analysis/report/page/maps.js",
            "tests/analysis/report/test_html.py::x",
            "tests/analysis/test_x.py",
        ),
        (
            "collab_heads/training/options/heads.py",
            "tests/training/options/test_heads_rotating.py::test_x",
            "tests/test_hub.py::test_x",
        ),
        ("benchmarks/digits.py", "tests/benchmarks/test_digits.py::test_x", "tests/benchmarks/test_gpu.py::test_x"),
        ("tests/test_hub.py", "tests/test_hub.py::test_x", "tests/base/test_display_text.py::test_x"),
        ("tests/compression/conftest.py", "tests/compression/test_compress.py::test_x", "tests/test_hub.py::test_x"),
        (
            "adapters/bert.py",
            "tests/test_contract.py::test_x[camembert-shared]",
            "tests/test_contract.py::test_x[albert]",
        ),
        ("adapters/gpt2.py", "tests/test_contract.py::test_x[shared-gpt2-decoder]", "tests/test_gpt2.py::test_x"),
        ("docs/guides/compress.md", "tests/test_docs.py::test_x", "tests/test_readme.py::test_x"),
        ("pyproject.toml", "tests/test_packaging.py::test_wheel", "tests/base/test_extras.py::test_x"),
    ),
)
def test_a_file_has_the_tests_of_its_name_or_its_folder(changed, touched, untouched):
    assert touching([changed])(touched) and not touching([changed])(untouched)
    assert touching(["LICENSE", changed])(touched)


def test_what_has_no_tests_of_its_own_touches_none():
    assert {pattern_of(path) for path in ("collab_heads/errors.py", "tests/families.py", "LICENSE", "Makefile")} == {
        None
    }
    assert not touching([])("tests/test_hub.py::test_x")


def test_the_touched_come_first_and_every_test_gets_its_turn():
    items, touched = list(range(40)), [item in (3, 30, 31) for item in range(40)]
    orders = [in_turn(items, touched, count) for count in range(20)]
    assert all(sorted(order) == items and set(order[:3]) == {3, 30, 31} for order in orders)
    others = [item for item in items if not touched[item]]
    assert orders[0] == [3, 30, 31, *others]
    start = others.index(orders[1][3])
    assert orders[1][3:] == others[start:] + others[:start] and start == int(place(1) * len(others)) == 22
    assert {item for order in orders for item in order[:6]} == set(items)  # each run has time for six of the forty


@pytest.fixture
def history(tmp_path, monkeypatch):
    """A repository: a file that was changed a day before the last commit, two an hour before, one of them since."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    who = ("-c", "user.name=x", "-c", "user.email=x@y")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for names, date in ((["old"], "2026-01-01T12:00"), (["old", "new"], "2026-01-02T11:00"), ([], "2026-01-02T12:00")):
        for name in names:
            (tmp_path / f"{name}.py").write_text(date if name != "old" else "")
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"{date}:00 +0000")
        subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
        subprocess.run(["git", *who, "commit", "-q", "--allow-empty", "-m", "x"], cwd=tmp_path, check=True)
    return tmp_path


def test_what_changed_is_what_the_last_commits_say_and_the_work_tree(history):
    assert (changed_files(history), commits(history)) == (["new.py"], 3)
    (history / "old.py").write_text("changed")
    assert changed_files(history) == ["new.py", "old.py"]


def test_where_there_is_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert (changed_files(tmp_path), commits(tmp_path)) == ([], 0)


@pytest.fixture
def suite(pytester, monkeypatch):
    """Tests in two files: a test of the second, that of what changed, takes 16 minutes, one of the first nine."""
    monkeypatch.syspath_prepend(TESTS)
    monkeypatch.setattr(slow_share, "changed_files", lambda root: ["tests/test_second.py"])
    monkeypatch.setattr(slow_share, "commits", lambda root: 0)
    monkeypatch.setattr(slow_share, "STARTED", time.monotonic())
    pytester.makeconftest("pytest_plugins = ('slow_share',)")
    (pytester.path / "tests").mkdir()
    text = "import slow_share\ndef test_one(): pass\ndef test_two(): slow_share.STARTED -= 60 * {}; assert False\n"
    for name, minutes in (("first", 9), ("second", 16)):
        file = pytester.path / "tests" / f"test_{name}.py"
        file.write_text(text.format(minutes) + "def test_three(): pass\n")
    return pytester


def test_what_changed_comes_first_and_no_test_starts_after_its_time_is_over(suite):
    done = suite.runpytest_inprocess("--slow_minutes", "20", "-rs", "tests")
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.assert_outcomes(passed=2, failed=2, skipped=2)
    done.stdout.fnmatch_lines(["of 1 changed files: 2 of 3 tests", "of all others, place 0.00: 2 of 3 tests"])
    done.stdout.fnmatch_lines(["* s     2 tests  tests/test_second.py"])
    done.stdout.fnmatch_lines([f"SKIPPED *{LEFT_OUT}"])


def test_without_the_flag_nothing_changes(suite):
    done = suite.runpytest_inprocess("tests")
    done.assert_outcomes(passed=4, failed=2)
    assert "changed files" not in done.stdout.str()
