"""The top-level adapters/ folder is collab_heads.adapters everywhere: checkout, wheel, sdist, beside AdapterHub."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import collab_heads
from collab_heads.adapters import bert

ROOT = Path(__file__).parents[1]
FAMILIES = sorted(file.stem for file in (ROOT / "adapters").glob("*.py"))
REPORT = """
import collab_heads
from collab_heads.contract.registry import all_adapters
print(collab_heads.__file__)
print(collab_heads.adapters.bert.__file__)
print(",".join(collab_heads.supported_model_types()))
found = {type(each).__module__ for each in all_adapters().values()}
print(",".join(sorted(name.removeprefix("collab_heads.adapters.") for name in found)))
"""


def python(code: str, *, path: Path, cwd: Path) -> list[str]:
    """Lines printed by a fresh interpreter that finds modules in `path` first."""
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_adapters_are_those_of_the_checkout():
    assert Path(bert.__file__) == ROOT / "adapters" / "bert.py"
    assert bert.__name__ == "collab_heads.adapters.bert"
    assert not (ROOT / "adapters" / "__init__.py").exists()
    assert sorted(file.name for file in (ROOT / "collab_heads" / "adapters").glob("*.py")) == ["__init__.py"]


@pytest.mark.slow
def test_beside_adapterhub(tmp_path):
    """A package named `adapters` that comes first on the path, as AdapterHub's does, is neither used nor disturbed."""
    hub = tmp_path / "path" / "adapters"
    hub.mkdir(parents=True)
    (hub / "__init__.py").write_text("WHOSE = 'hub'\n")
    (hub / "bert.py").write_text("raise RuntimeError('the wrong adapters')\n")
    code = "import collab_heads, adapters\nprint(adapters.WHOSE, adapters.__file__)\n" + REPORT
    lines = python(code, path=hub.parent, cwd=tmp_path)
    assert lines[0] == f"hub {hub / '__init__.py'}"
    assert lines[2:] == [
        str(ROOT / "adapters" / "bert.py"),
        ",".join(collab_heads.supported_model_types()),
        ",".join(FAMILIES),
    ]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with an sdist, the wheel built from it, and in `direct` the wheel built from the sources."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("collab_heads", "adapters", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("results"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "Makefile", "constraints.txt", ".gitignore"):
        shutil.copy(ROOT / name, source / name)
    (source / "adapters" / "__pycache__").mkdir(exist_ok=True)
    (source / "adapters" / "__pycache__" / "bert.cpython-300.pyc").write_bytes(b"stale")
    build = [sys.executable, "-m", "build", "--no-isolation", str(source)]
    for more in (["--outdir", str(out)], ["--wheel", "--outdir", str(out / "direct")]):
        done = subprocess.run([*build, *more], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return out


def contents(wheel: Path) -> dict[str, str]:
    """Name -> digest of every file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


@pytest.mark.slow
def test_wheel(built):
    (wheel,) = built.glob("*.whl")
    names = contents(wheel)
    assert {f"collab_heads/adapters/{name}.py" for name in ["__init__", *FAMILIES]} <= names.keys()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"collab_heads"}
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    ours = {str(file.relative_to(ROOT)) for file in (ROOT / "collab_heads").rglob("*.py")}
    assert ours <= names.keys()


@pytest.mark.slow
def test_the_description_on_an_index_has_no_link_that_leads_nowhere(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode("utf-8")
    assert "\nDescription-Content-Type: text/markdown\n" in text and "\n# collab_heads\n" in text
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets and [target for target in targets if not target.startswith(("https://", "#"))] == []


def test_links_of_the_description():
    pytest.importorskip("hatchling")
    spec = spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    spec.loader.exec_module(hook := module_from_spec(spec))
    readme = "![two\nlines](a/b.svg) [x](docs/x.md#y) [site](https://x.org/) [z](#z)\n```python\na[0](1)\n```\n"
    alone = " x [site](https://x.org/) [z](#z)\n```python\na[0](1)\n```\n"
    assert hook.description(readme, None, "1.0") == alone
    links = hook.description(readme, "https://github.com/me/it/", "1.0").split("```")[0].split(") ")
    assert links[:2] == [
        "![two\nlines](https://github.com/me/it/raw/v1.0/a/b.svg",
        "[x](https://github.com/me/it/blob/v1.0/docs/x.md#y",
    ]
    assert links[2:] == ["[site](https://x.org/", "[z](#z)\n"]


@pytest.mark.slow
def test_sdist_builds_the_same_wheel(built):
    (wheel,), (direct,), (sdist,) = built.glob("*.whl"), (built / "direct").glob("*.whl"), built.glob("*.tar.gz")
    assert contents(wheel) == contents(direct)
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "Makefile", "adapters/bert.py", "tests/families.py"} <= names


@pytest.mark.slow
def test_installed_wheel(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    assert not (target / "adapters").exists()
    lines = python(REPORT, path=target, cwd=tmp_path)
    assert lines == [
        str(target / "collab_heads" / "__init__.py"),
        str(target / "collab_heads" / "adapters" / "bert.py"),
        ",".join(collab_heads.supported_model_types()),
        ",".join(FAMILIES),
    ]


def test_the_version_stands_in_one_place():
    """Of what is installed, of the citation, of the package."""
    assert metadata.version("collab-heads") == collab_heads.__version__
    assert f"\nversion: {collab_heads.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert 'dynamic = ["version", "readme"]' in (ROOT / "pyproject.toml").read_text()


def test_the_pages_say_what_is_declared():
    """The lowest Python and transformers stand where readers look for them."""
    declared = (ROOT / "pyproject.toml").read_text()
    python = re.search(r'requires-python = ">=([\d.]+)"', declared)[1]
    lowest = re.search(r'"transformers>=([\d.]+),', declared)[1]
    said = {
        name: (ROOT / name).read_text() for name in ("README.md", "docs/index.md", "docs/limits.md", "docs/support.md")
    }
    assert all(f"Python {python} or newer" in said[name] for name in ("README.md", "docs/index.md"))
    assert f"transformers {lowest} or later" in said["docs/index.md"]
    assert f"transformers below {lowest} is not supported" in said["docs/limits.md"]
    assert f"Python {python} to " in said["docs/support.md"] and f"transformers {lowest} " in said["docs/support.md"]
