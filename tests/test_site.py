"""The site that `make docs` builds: notebooks as pages, and code that fits its column."""

import base64
import importlib.util
import subprocess
import sys

import pytest
from chromium import MISSING, PROGRAM, Browser
from pages import DOCS, ROOT

PICTURE = base64.b64encode(b"a picture").decode()
NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "source": ["# Two words\n", "\n", "See [heads](../docs/guides/compress.md#x), "]},
        {
            "cell_type": "markdown",
            "source": "[the other](translate.ipynb), [this](../README.md) and [that](https://a.b).",
        },
        {
            "cell_type": "code",
            "source": "print('```')",
            "outputs": [
                {"output_type": "stream", "text": ["\x1b[31mred\x1b[0m ```\n"]},
                {"output_type": "display_data", "data": {"image/png": PICTURE, "text/plain": "<Figure 1>"}},
                {"output_type": "execute_result", "data": {"text/markdown": "**bold**", "text/plain": "bold"}},
            ],
        },
        {"cell_type": "code", "source": "", "outputs": []},
    ]
}
PAGE = """# Two words

*The notebook `notebooks/two.ipynb` with the outputs of its last run: [download it](two.ipynb).*

See [heads](../guides/compress.md#x),

[the other](translate.md), this and [that](https://a.b).

````python
print('```')
````

````{ .text .output }
red ```
````

![What the cell drew](two-1.png)

**bold**
"""


@pytest.fixture(scope="module")
def hook():
    """The module that makes pages of notebooks."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    spec = importlib.util.spec_from_file_location("notebook_pages", DOCS / "hooks" / "notebook_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_notebook_is_a_page(hook):
    pictures = {}
    assert hook.page(NOTEBOOK, "two", pictures) == PAGE
    assert pictures == {"two-1.png": b"a picture"}


def test_a_notebook_without_a_heading_has_its_name(hook):
    untitled = {"cells": [{"cell_type": "code", "source": ["a = 1\n", "b = 2"], "outputs": []}]}
    assert hook.title(untitled) is None
    assert hook.page(untitled, "sums", {}).startswith("# sums\n")
    assert "```python\na = 1\nb = 2\n```" in hook.page(untitled, "sums", {})


def test_every_notebook_of_the_repository_is_a_page(hook):
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        notebook, pictures = hook.read(path), {}
        text = hook.page(notebook, path.stem, pictures)
        outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
        assert len(pictures) == sum("image/png" in output.get("data", {}) for output in outputs)
        assert all(f"]({name})" in text for name in pictures)


CUT = """[...document.querySelectorAll('.md-content pre > code, .md-content .highlight')]
    .filter(block => block.clientWidth && block.scrollWidth > block.clientWidth + 1)
    .map(block => block.textContent.split('\\n').sort((a, b) => b.length - a.length)[0])"""
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
def test_no_code_is_cut_and_no_page_scrolls_sideways(hook, tmp_path):
    folder = tmp_path / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    pages = sorted(folder.rglob("index.html"))
    assert {f"notebooks/{path.stem}" for path in (ROOT / "notebooks").glob("*.ipynb")} <= {
        str(page.parent.relative_to(folder)) for page in pages
    }
    cut = {}
    with Browser(tmp_path / "profile", width=1400) as browser:
        for width in (1400, 400):
            browser.resize(width, 900)
            for page in pages:
                browser.open(page)
                if found := [*browser.value(CUT), *[browser.value(WIDER)] * bool(browser.value(WIDER))]:
                    cut[f"{page.parent.relative_to(folder)} at {width}"] = found
    assert cut == {}
