"""The site that `make docs` builds: notebooks as pages, and code that fits its column."""

import base64
import importlib.util
import re
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

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


def hook_of(name: str):
    """A module that mkdocs calls."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "hooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hook():
    """The module that makes pages of notebooks."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    return hook_of("notebook_pages")


def test_quantities_stay_on_one_line():
    text = "<td>91 → 70</td> <p>loses 0.9 % of <code>4 → 3 %</code> 1 → <em>2</em>, 3 points <pre><b>5 %</b></pre>"
    whole = hook_of("whole_numbers").whole(text)
    assert whole == text.replace("91 → 70", "91\N{NBSP}→\N{NBSP}70").replace("0.9 %", "0.9\N{NBSP}%")


def test_pages_outside_the_sidebar_lead_to_the_page_that_lists_them(hook):
    def shown(name: str, parent: object = None) -> str:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=name), parent=parent)
        return hook_of("parents").on_page_markdown("# Speed\n\nTimes.\n", page)

    assert shown("results/speed.md") == "# Speed\n\nPart of [Results](index.md).\n\nTimes.\n"
    for listed in (shown("results/speed.md", "Results"), shown("results/index.md"), shown("limits.md")):
        assert listed == "# Speed\n\nTimes.\n"


def test_the_changelog_is_a_page_whose_links_lead_to_pages():
    def shown(name: str) -> str:
        return hook_of("changelog").on_page_markdown("# A page\n", SimpleNamespace(file=SimpleNamespace(src_uri=name)))

    text = shown("changelog.md")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert text.startswith("# Changelog\n") and links and all((DOCS / link).is_file() for link in links)
    assert shown("limits.md") == "# A page\n"


def test_notebooks_have_a_page_that_lists_them(hook):
    text = hook.listed([ROOT / "notebooks" / "serve.ipynb"])
    assert text.startswith("# Notebooks\n") and text.rstrip().endswith("](serve.md)")
    config = SimpleNamespace(nav=[{"Start": "index.md"}, {"The scripts": "scripts.md"}], docs_dir=str(DOCS))
    assert hook.on_config(config).nav[1] == {"Notebooks": "notebooks/index.md"}


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
# names of tables that go on in the next line, and examples of docstrings that became prose
TORN = """[...document.querySelectorAll('.md-content :is(td, th) code')]
    .filter(name => /^\\w+$/.test(name.textContent) && name.getClientRects().length > 1)
    .concat([...document.querySelectorAll('blockquote blockquote')]).map(found => found.textContent)"""
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


DARK = 64  # of 255
GROUND = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"


@pytest.fixture(scope="module")
def site(hook, tmp_path_factory):
    """The folder of the site, and its address: from a file the worker of the search could not start."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    """A server that writes no line for each request."""

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture(scope="module")
def browser(site, tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile"), width=1400) as browser:
        yield browser


def pages_of(folder: Path) -> list[str]:
    """The addresses of the pages of a site, from its root."""
    return sorted(f"{page.parent.relative_to(folder)}/".removeprefix("./") for page in folder.rglob("index.html"))


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
@pytest.mark.parametrize("scheme", ("light", "dark"))
@pytest.mark.parametrize("width", (1400, 400))
def test_pages_fit_and_the_console_is_empty(site, browser, width, scheme):
    folder, root = site
    pages = pages_of(folder)
    assert {f"notebooks/{path.stem}/" for path in (ROOT / "notebooks").glob("*.ipynb")} <= set(pages)
    browser.resize(width, 900)
    browser.scheme(scheme)
    browser.problems.clear()
    found = {}
    for page in pages:
        browser.open(root + page)
        wrong = [*browser.value(CUT), *browser.value(TORN)]
        if wider := browser.value(WIDER):
            wrong.append(f"{wider} pixels wider")
        if (max(browser.value(GROUND)) < DARK) != (scheme == "dark"):
            wrong.append("the colours of the other scheme")
        wrong += browser.problems
        browser.problems.clear()  # here: what a page says late is found with the next one
        if wrong:
            found[page] = wrong
    assert found == {}


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
def test_the_search_finds_and_the_switch_changes_colours(site, browser):
    browser.resize(1400, 900)
    browser.scheme("light")
    browser.problems.clear()
    browser.open(site[1])
    label = "[data-md-component=palette] label:not([hidden])"
    for to, scheme in (("Switch to dark", "default"), ("Follow the system", "slate"), ("Switch to light", "default")):
        browser.click(label)
        browser.wait(f"document.querySelector('{label}').title === '{to}'")
        browser.wait(f"document.body.getAttribute('data-md-color-scheme') === '{scheme}'")
    browser.value("document.querySelector('.md-search__input').focus()")
    browser.type("trim_vocabulary")
    browser.wait("document.querySelectorAll('.md-search-result__item').length > 1")
    assert browser.problems == []
