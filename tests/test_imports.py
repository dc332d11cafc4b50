"""Imports point one way, and model families are known in adapters/ only."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import transformers

from collab_heads import supported_model_types

ROOT = Path(__file__).parents[1]
PACKAGE, ADAPTERS = ROOT / "collab_heads", ROOT / "adapters"

# From the bottom up, a line a folder: a module may import from lower layers and from its own.
LAYERS = (
    ("errors", "base"),
    ("files",),
    ("sites",),
    ("layers",),
    ("contract",),
    ("adapters",),
    ("model",),
    ("running",),
    ("saving",),
    ("calibration",),
    ("fitting",),
    ("collaborative",),
    ("heads",),
    ("plots",),
    ("heads.penalty",),
    ("distillation",),
    ("analysis.measures",),
    ("analysis.roles",),
    ("analysis.relevance",),
    ("serving",),
    ("compression.parts",),
    ("compression",),
    ("analysis.report",),
    ("analysis",),
    ("vocabulary",),
    ("rotation",),
    ("trainer",),
    ("data",),
    ("evaluation",),
    ("training",),
    ("", "modeling_collab_heads"),  # the public names; what is stored beside a model imports them
    ("training.options",),
    ("training.storage",),
    ("training.loop",),
    ("training.runs",),
    ("demo",),
    ("command", "__main__"),
)
# Between the adapters and the public names, no layer may import the families.
USES_ADAPTERS = {"", "training", "command", "adapters"}


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
    assert found, f"collab_heads.{name} is in no layer: move it into a folder, or add the folder to LAYERS"
    return found[max(found, key=len)]


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def imports(source: str) -> list[tuple[str, str]]:
    """(module, name) of every import at any depth; name is empty for `import module`."""
    found = []
    for node in ast.walk(parsed(source)):
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
            origin = getattr(getattr(transformers, name, None), "__module__", "")  # of a submodule none
            if origin.startswith("transformers.models.") and not origin.startswith("transformers.models.auto"):
                found.append(name)
    return found


DRAWS = {"matplotlib", "PIL"}
SPEAKING = {"", "adapters", "analysis", "plots", "demo", "training"}  # packages whose __init__ holds names
FOLDERS = {name for name, file in MODULES.items() if file.name == "__init__.py"}
IN_LAYERS = MODULES.keys() - (FOLDERS - SPEAKING)


def test_imports_point_one_way():
    wrong = {name: wrong_imports(name, MODULES[name].read_text()) for name in sorted(IN_LAYERS)}
    assert {name: targets for name, targets in wrong.items() if targets} == {}


def circles(graph: dict[str, set[str]]) -> list[str]:
    """The modules that import themselves by way of others."""

    def reached(name: str) -> set[str]:
        seen, waiting = set(), [name]
        while waiting:
            new = graph[waiting.pop()] & graph.keys() - seen
            seen |= new
            waiting += new
        return seen

    return sorted(name for name in graph if name in reached(name))


def test_no_module_imports_itself_by_way_of_others():
    found = circles({name: targets(MODULES[name].read_text()) for name in MODULES})
    assert found == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_every_other_package_is_empty():
    assert [name for name in FOLDERS - SPEAKING if imports(MODULES[name].read_text())] == []


def test_families_are_known_to_adapters_only():
    known = {name: family_imports(MODULES[name].read_text()) for name in MODULES if not name.startswith("adapters.")}
    assert {name: families for name, families in known.items() if families} == {}


WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+[0-9]*(?![a-z])")  # MarianMTLoader: Marian MT Loader


def family_names(source: str) -> set[str]:
    """Names of model types in a source, alone or as a part of another name; lines of examples do not count.

    llama.cpp is an engine.
    """
    lines = "\n".join(line for line in source.splitlines() if not line.lstrip().startswith((">>>", "... ")))
    lines = re.sub(r"\bllama(\.cpp|_\w+(\.Llama)?)", "", lines)
    words = {word.lower() for word in WORDS.findall(lines)}
    whole = {word.lower() for word in re.findall(r"[\w-]+", lines)}
    return {name for name in supported_model_types() if name in words | whole or name.split("_")[0] in words}


def test_what_writes_for_engines_names_no_family():
    """Adapters describe their families for engines."""
    sources = {name: MODULES[name].read_text() for name in MODULES if name.startswith("serving.")}
    found = {name: family_names(source) for name, source in sources.items()}
    assert len(sources) > 5 and {name: families for name, families in found.items() if families} == {}


def test_a_family_name_is_seen():
    named = ('"xlm-roberta": {}', "class MarianMTLoader:", "# as T5 does", "models.Whisper", "'m2m_100'", "no Gemma3")
    assert [source for source in named if not family_names(source)] == []
    free = (">>> BertModel(BertConfig())", "an option", "import export", "invite", "CTranslate2")
    assert [source for source in free if family_names(source)] == []


def test_the_package_draws_nothing_until_it_is_asked():
    """What draws may be missing: importing the package imports none of it."""
    seen, waiting = set(), [""]
    while waiting:
        name = waiting.pop()
        seen.add(name)
        first = at_once(MODULES[name].read_text())
        assert not {module.split(".")[0] for module, _ in imports(first)} & DRAWS, name
        waiting += targets(first) - seen
    assert {"contract.registry", "analysis.report.head_report"} < seen
    assert at_once("def f():\n    import matplotlib") == ""
    assert at_once("if True:\n    import matplotlib.pyplot\n") == "import matplotlib.pyplot"


def at_once(source: str) -> str:
    """The imports that run with the module."""
    tree = parsed(source)
    later = {id(node) for each in ast.walk(tree) if runs_later(each) for node in ast.walk(each)}
    first = [each for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom) and id(each) not in later]
    return "\n".join(map(ast.unparse, first))


def runs_later(node: ast.AST) -> bool:
    """A function, or what only type checkers read."""
    return isinstance(node, ast.FunctionDef) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")


FRESH = """
import sys, torch, transformers
from transformers import AutoModel, AutoTokenizer, PreTrainedModel
before = set(sys.modules)
import collab_heads
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.slow
def test_importing_the_package_imports_no_modelling_code():
    """The rest takes a third of a second, the code of forty families a whole one."""
    done = subprocess.run([sys.executable, "-c", FRESH], cwd=ROOT, capture_output=True, text=True, check=True)
    added = done.stdout.split()
    assert "collab_heads.saving.transformers_hooks" in added
    assert [name for name in added if re.match(r"transformers\.models\.\w+\.|collab_heads\.adapters\.", name)] == []


@cache
def at_import(source: str) -> str:
    """The imports that happen when the module is imported: at top level, under no condition."""
    nodes = [node for node in parsed(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return ast.unparse(ast.Module(nodes, []))


def packages(name: str) -> dict[str, str]:
    """Third-party package -> a module that imports it, of all that importing a module brings in."""
    seen, todo, found = set(), [name, ""], {}
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        source = at_import(MODULES[name].read_text())
        todo += [target for target in targets(source) if target in MODULES]
        roots = {module.split(".")[0] for module, _ in imports(source)} - sys.stdlib_module_names
        found |= {root: name for root in roots}
    return found


# the last three come with transformers
BASE = {"collab_heads", "torch", "transformers", "safetensors", "tqdm"} | {"huggingface_hub", "numpy", "packaging"}


@pytest.mark.parametrize("name", ("", "__main__", "command.work", "demo.demos"))
def test_what_needs_no_extra_imports_none(name):
    others = {package: where for package, where in packages(name).items() if package not in BASE}
    assert others == {}


def test_what_needs_an_extra_is_seen():
    assert {"accelerate", "sacrebleu", "sentencepiece", "datasets"} <= packages("training.runs.translator").keys()


def test_all_files_are_seen():
    assert {
        "",
        "errors",
        "base.arguments",
        "collaborative.swap",
        "heads.prune",
        "adapters",
        "adapters.bert",
        "demo.demos",
    } <= MODULES.keys()
    assert "transformers.models.bert" in family_imports(MODULES["adapters.bert"].read_text())
    assert "layers.attention" in targets(MODULES["adapters.bert"].read_text())


WRONG = (
    ("errors", "from collab_heads.layers.gates import HeadGates"),
    ("layers.query_key", "def f():\n    from collab_heads.collaborative import decompose"),
    ("layers.attention", "import collab_heads.contract.registry"),
    ("contract.registry", "from collab_heads import adapters"),
    ("contract.registry", "from collab_heads.model.refusals import check_wrapper"),
    ("collaborative.swap", "from collab_heads.adapters.bert import BertAdapter"),
    ("collaborative.swap", "from collab_heads import swap_to_collaborative"),
    ("collaborative.swap", "from collab_heads.heads.gating import swap_to_gated"),
    ("saving.transformers_hooks", "from collab_heads.demo.demos import Demo"),
    ("heads.gating", "from collab_heads.heads.penalty import parts"),
    ("heads.prune", "from collab_heads import adapters"),
    ("heads.selection", "from collab_heads.analysis.measures.head_scores import head_scores"),
    ("analysis.measures.head_scores", "from collab_heads.analysis.report.html import page"),
    ("training.options.heads", "from collab_heads.training.runs.run import Run"),
)
FAMILY = ("from transformers import BertModel", "import transformers.models.t5", "from transformers import T5Config")


def test_a_wrong_import_is_seen():
    assert [(name, source) for name, source in WRONG if len(wrong_imports(name, source)) != 1] == []


def test_a_family_import_is_seen():
    assert [source for source in FAMILY if len(family_imports(source)) != 1] == []
