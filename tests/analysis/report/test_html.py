"""The page: everything in one file, nothing that runs but its own script, nothing from elsewhere."""

import base64
import hashlib
import io
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from collab_heads.analysis import HeadReport
from collab_heads.analysis.report import head_report
from collab_heads.analysis.report.html import FOLDER, SCRIPTS, Drawing, Section, page
from collab_heads.analysis.report.pictures import pictures_of

pytest.importorskip("matplotlib")
image = pytest.importorskip("PIL.Image")
EVIL = '<script>alert("1")</script>'
EMPTY = ("meta", "img", "input", "source")


class Reader(HTMLParser):
    """Tags with their attributes, the text of cells, and what stands in scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.open, self.cells, self.scripts = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)

    def all(self, tag: str) -> list[dict]:
        return [attributes for each, attributes in self.tags if each == tag]


def pictures(reader: Reader) -> list[bytes]:
    sources = [attributes["src"] for attributes in reader.all("img")]
    return [base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True) for source in sources]


def test_text_is_text_and_numbers_stand_on_the_right():
    table = (["head", EVIL], [["0", "a & b"], ["-1.5", "2"]])
    sections = [Section("One", EVIL, table), Section("Two", name="second")]
    reader = Reader(text := page(EVIL, sections, lead=[EVIL], warnings=[EVIL]))
    assert not reader.open and EVIL not in text and text.count("&lt;script&gt;") == 6
    assert reader.cells == ["head", EVIL, "0", "a & b", "-1.5", "2"]
    kinds = [attributes.get("class") for tag, attributes in reader.tags if tag in ("td", "th")]
    assert kinds == ["number", None] * 3
    links = [attributes["href"] for attributes in reader.all("a")]
    assert links == [f"#{each['id']}" for each in reader.all("section")] == ["#s0", "#second"]


@pytest.mark.slow
def test_only_its_own_script_may_run(html):
    """By the hash that browsers compare; what a model or a token is called cannot end the data."""
    reader = Reader(text := html.read_text(encoding="utf-8"))
    policy = next(each["content"] for each in reader.all("meta") if "http-equiv" in each)
    data, script = reader.scripts
    assert reader.all("script") == [{"type": "application/json", "id": "data"}, {}]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert "<" not in data and json.loads(data)["heads"]
    assert EVIL not in text and "&lt;script&gt;" in text
    assert not re.search(r"(?:src|href)=.(?!#|data:)", text) and "url(" not in text and "@import" not in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", script)


def test_every_file_of_the_page_is_in_it(html):
    text = html.read_text(encoding="utf-8")
    files = {file.name for file in FOLDER.iterdir()}
    assert files == {f"{name}.js" for name in SCRIPTS} | {"page.css", "page.html"}
    for name in files - {"page.html"}:
        content = (FOLDER / name).read_text(encoding="utf-8")
        assert content in text and len(content.splitlines()) <= 250, name


def test_a_report_is_one_file_with_pictures_of_what_cannot_be_explored(report, html):
    reader = Reader(html.read_text(encoding="utf-8"))
    assert [path.name for path in html.parent.iterdir()] == ["report.html"]
    (drawn,), (shown,) = pictures(reader), reader.all("img")
    with image.open(io.BytesIO(drawn)) as picture:
        assert picture.format == "PNG" and min(picture.size) > 100
        assert len(set(picture.convert("L").resize((64, 64)).tobytes())) > 5
        assert picture.convert("RGBA").getpixel((0, 0)) == (255,) * 4  # opaque: it reads on dark pages, too
    said = shown["alt"]
    assert said.startswith("Relevance of all heads, sorted") and re.search(
        r"balance 0\.\d\d in enc-self, balance", said
    )
    assert all(cell in reader.cells for row in report.text_rows()[1] for cell in row if cell)
    tables = [each for each in reader.all("div") if each.get("class") == "scroll"]
    assert tables and all(each["tabindex"] == "0" and each["aria-label"] for each in tables)


def test_every_head_has_a_link(report, html):
    """To its row where scripts are off, and from the heads that can go."""
    reader = Reader(html.read_text(encoding="utf-8"))
    rows = [each["id"] for each in reader.all("tr") if "id" in each]
    assert rows == [f"{site.role}-{site.layer}-{number}" for site in report.sites for number in report.heads[site.path]]
    links = [each["href"] for each in reader.all("a") if "data-head" in each]
    assert links and set(links) <= {f"#{each}" for each in rows}


def test_without_matplotlib_the_page_says_what_is_missing(report, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = report.to_html()
    assert head_report.WITHOUT_PICTURES in text and not pictures(Reader(text))
    assert '"sentences":[{' in text
    report.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.json"}


def test_alternative_texts_are_text():
    reader = Reader(page("", [Section("One", pictures=[Drawing(b"", 'a "b" <c>')])]))
    assert [each["alt"] for each in reader.all("img")] == ['a "b" <c>']


def test_pictures_that_would_be_too_small_have_a_box_that_scrolls():
    drawn = []
    for width in (600, 1600, 1800):
        buffer = io.BytesIO()
        image.new("1", (width, 1)).save(buffer, "png")
        drawn.append(Drawing(buffer.getvalue(), ""))
    reader = Reader(page("", [Section("One", pictures=drawn)]))
    assert reader.all("figure") == [{}, {"class": "broad", "tabindex": "0"}, {"class": "wide", "tabindex": "0"}]


def test_pictures_are_named_after_what_they_show(report):
    pictures = pictures_of(report)
    names = {each.name for each in pictures}
    assert {"confidence", "entropy", "attention_distance", "l2_distance", "cosine", "l2", "roles"} <= names
    assert {f"attention_{site.role}_{site.layer}" for site in report.sites} <= names
    assert not {"gradient", "quality", "alphas", "gate_history"} & names
    assert [each.name for each in pictures if each.alt] == ["relevance_distribution"]


def test_a_folder_with_everything(report, tmp_path, monkeypatch):
    figures = {each.name: each.draw() for each in pictures_of(report) if each.name == "confidence"}
    monkeypatch.setattr(HeadReport, "plot", lambda self: figures)
    report.save(tmp_path / "out")
    expected = {"report.html", "report.json", "confidence.png", "confidence.svg"}
    assert {path.name for path in Path(tmp_path / "out").iterdir()} == expected
    assert (tmp_path / "out" / "report.json").read_text() == report.to_json() + "\n"
