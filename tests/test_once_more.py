"""A test that fails or whose process dies runs once more, alone: it fails the run only if it fails again."""

import os

import pytest
from once_more import main

pytestmark = pytest.mark.slow

BESIDE_ANOTHER = """
import os
from pathlib import Path

def test_one(): Path("one").touch()
def test_two(): {}
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Writes a file of two tests, of which the second does something; each leaves a file behind that says it ran."""
    monkeypatch.chdir(tmp_path)

    def write(second):
        (tmp_path / "test_pair.py").write_text(BESIDE_ANOTHER.format(second))
        return ["-q", "test_pair.py"]

    return write


ONCE = "assert os.path.exists('ran') or Path('ran').touch()"  # fails when it runs for the first time
DIES_ONCE = "os.path.exists('ran') or (Path('ran').touch(), os.kill(os.getpid(), 9))"


@pytest.mark.parametrize(
    "second, workers, code",
    (("pass", [], 0), (ONCE, [], 0), (DIES_ONCE, ["-n", "1"], 0), ("assert False", [], 1)),
    ids=("passes", "fails once", "dies once", "fails again"),
)
def test_a_failure_counts_if_it_comes_again(suite, capfd, second, workers, code):
    assert main([*suite(second), *workers]) == code
    said = capfd.readouterr().out
    assert ("unstable: failed beside other tests, passed alone\n  test_pair.py::test_two" in said) == (
        "ran" in os.listdir()
    )
    assert ("once more, alone: test_pair.py::test_two" in said) == (second != "pass")


def test_many_failures_are_no_chance(suite, capfd):
    arguments = suite("assert False")
    with open("test_pair.py", "a") as file:
        file.write("import pytest\n@pytest.mark.parametrize('n', range(5))\ndef test_many(n): assert False\n")
    assert main(arguments) == 1 and "once more" not in capfd.readouterr().out


@pytest.mark.parametrize("arguments, code", ((["not_there.py"], 4), (["--not_a_flag"], 4), (["-k", "nothing"], 5)))
def test_a_run_that_cannot_begin_is_a_fault(suite, arguments, code):
    assert main([*suite("pass"), *arguments]) == code
