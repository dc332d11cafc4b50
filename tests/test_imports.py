"""Imports point one way, and model families are known in adapters/ only."""

import ast
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[1]
PACKAGE, ADAPTERS = ROOT / "collab_heads", ROOT / "adapters"

# From the bottom up: a module may import from lower layers and from its own.
LAYERS = (
    ("errors", "fresh", "tables"),
    ("files", "folders"),
    ("sites",),
    ("config",),
    ("heads.removal",),
    ("heads.gates",),
    ("heads.mixing",),
    ("heads.output",),
    ("collaborative.solvers",),
    ("collaborative.decompose",),
    ("collaborative.query_key",),
    ("collaborative.one_key",),
    ("collaborative.attention",),
    ("registry",),
    (
        "adapters",
        "refusals",
        "persist",
        "heads",  # all of it that is not below
        "analysis",
        *(
            f"collaborative.{name}"
            for name in (
                "allocate",
                "calibrate",
                "fit",
                "masks",
                "refine",
                "report",
                "scratch",
                "swap",
                "terms",
                "widths",
            )
        ),
    ),
    ("",),  # the package itself: the public names
    ("training", "analysis.__main__"),
)
# Within the layer above the registry: only the public names may import the families.
USES_ADAPTERS = {"", "training", "adapters"}


def modules() -> dict[str, Path]:
    """Name within the package -> file."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found | {f"adapters.{file.stem}": file for file in ADAPTERS.glob("*.py")}


MODULES = modules()


def layer(name: str) -> int:
    """Index of the layer of a module, by its longest listed prefix."""
    found = {
        listed: index
        for index, names in enumerate(LAYERS)
        for listed in names
        if name == listed or (listed and name.startswith(listed + "."))
    }
    assert found, f"collab_heads.{name} is in no layer: add it to LAYERS"
    return found[max(found, key=len)]


def imports(source: str) -> list[tuple[str, str]]:
    """(module, name) of every import at any depth; name is empty for `import module`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they point"
            found += [(node.module, alias.name) for alias in node.names]
    return found


def targets(source: str) -> set[str]:
    """The modules of this package that a source imports, as names within it."""
    found = set()
    for module, name in imports(source):
        if module.split(".")[0] == "collab_heads":
            inner = module.removeprefix("collab_heads").removeprefix(".")
            deeper = f"{inner}.{name}".removeprefix(".")
            found.add(deeper if deeper in MODULES or deeper == "adapters" else inner)
    return found


def wrong_imports(name: str, source: str) -> list[str]:
    return [
        target
        for target in targets(source)
        if layer(target) > layer(name)
        or (target.split(".")[0] == "adapters" and name.split(".")[0] not in USES_ADAPTERS)
    ]


def family_imports(source: str) -> list[str]:
    """Imports of a model family from transformers, directly or by its public name."""
    found = []
    for module, name in imports(source):
        if module.startswith("transformers.models"):
            found.append(module)
        elif module == "transformers" and name:
            origin = getattr(getattr(transformers, name), "__module__", "")
            if origin.startswith("transformers.models.") and not origin.startswith("transformers.models.auto"):
                found.append(name)
    return found


EMPTY = ("analysis", "collaborative", "heads")


def is_package(name: str) -> bool:
    """An __init__ without code is in no layer."""
    return name in EMPTY


@pytest.mark.parametrize("name", [name for name in MODULES if not is_package(name)])
def test_imports_point_one_way(name):
    assert wrong_imports(name, MODULES[name].read_text()) == []


@pytest.mark.parametrize("name", EMPTY)
def test_the_empty_packages_are_empty(name):
    assert imports(MODULES[name].read_text()) == []


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("adapters.")])
def test_families_are_known_to_adapters_only(name):
    assert family_imports(MODULES[name].read_text()) == []


def test_all_files_are_seen():
    assert {
        "",
        "errors",
        "collaborative.swap",
        "heads.prune",
        "adapters",
        "adapters.bert",
        "training.demo",
    } <= MODULES.keys()
    assert "transformers.models.bert" in family_imports(MODULES["adapters.bert"].read_text())
    assert "collaborative.attention" in targets(MODULES["adapters.bert"].read_text())


@pytest.mark.parametrize(
    "name, source",
    (
        ("errors", "from collab_heads.sites import ROLES"),
        ("collaborative.decompose", "def f():\n    from collab_heads.collaborative import attention"),
        ("collaborative.attention", "import collab_heads.registry"),
        ("registry", "from collab_heads import adapters"),
        ("collaborative.swap", "from collab_heads.adapters.bert import BertAdapter"),
        ("collaborative.swap", "from collab_heads import swap_to_collaborative"),
        ("persist", "from collab_heads.training.demo import main"),
        ("heads.output", "from collab_heads.registry import get_adapter"),
        ("heads.removal", "from collab_heads.heads.gates import HeadGates"),
        ("heads.gates", "from collab_heads.heads import output"),
        ("heads.prune", "from collab_heads import adapters"),
        ("collaborative.query_key", "from collab_heads.heads.gating import swap_to_gated"),
        ("registry", "from collab_heads.refusals import check_wrapper"),
    ),
)
def test_a_wrong_import_is_seen(name, source):
    assert len(wrong_imports(name, source)) == 1


@pytest.mark.parametrize(
    "source",
    ("from transformers import BertModel", "import transformers.models.t5", "from transformers import T5Config"),
)
def test_a_family_import_is_seen(source):
    assert len(family_imports(source)) == 1
