"""The page: everything in one file, nothing that runs, nothing from elsewhere."""

import base64
import io
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch
from measuring import EOS, ended, model_in

from collab_heads import analyze_heads
from collab_heads.analysis.report.head_report import HeadReport
from collab_heads.analysis.report.html import Section, page
from collab_heads.analysis.report.pictures import pictures_of
from families import cast

pytest.importorskip("matplotlib")
image = pytest.importorskip("PIL.Image")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1000,1400"
).split()
EVIL = '<script>alert("1")</script>'


class Reader(HTMLParser):
    """Tags with their attributes, and the text of cells."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.open, self.cells = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def pictures(reader: Reader) -> list[bytes]:
    sources = [attributes["src"] for tag, attributes in reader.tags if tag == "img"]
    return [base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True) for source in sources]


@pytest.fixture(scope="module")
def report() -> HeadReport:
    model, (inputs, _) = model_in("marian", "pruned"), ended("marian")
    model.config._name_or_path = EVIL
    return analyze_heads(model, [cast(inputs, model.dtype)], exclude=[EOS], parts=("statistics", "roles"))


@pytest.fixture(scope="module")
def html(report, tmp_path_factory):
    return report.save_html(tmp_path_factory.mktemp("page") / "deep" / "report.html")


def test_text_is_text_and_numbers_stand_on_the_right():
    table = (["head", EVIL], [["0", "a & b"], ["-1.5", "2"]])
    reader = Reader(text := page(EVIL, [Section("One", EVIL, table), Section("Two")]))
    assert not reader.open and "<script" not in text and text.count("&lt;script&gt;") == 4
    assert reader.cells == ["head", EVIL, "0", "a & b", "-1.5", "2"]
    kinds = [attributes.get("class") for tag, attributes in reader.tags if tag in ("td", "th")]
    assert kinds == ["number", None] * 3
    links = [attributes["href"] for tag, attributes in reader.tags if tag == "a"]
    names = [attributes["id"] for tag, attributes in reader.tags if tag == "section"]
    assert links == [f"#{name}" for name in names] == ["#s0", "#s1"]


def test_a_report_is_one_file_with_all_its_pictures(report, html):
    text = html.read_text(encoding="utf-8")
    reader = Reader(text)
    assert [path.name for path in html.parent.iterdir()] == ["report.html"]
    drawn = pictures(reader)
    assert len(drawn) == len(report.plot()) > 10
    for each in drawn:
        with image.open(io.BytesIO(each)) as picture:
            assert picture.format == "PNG" and min(picture.size) > 100
            assert len(set(picture.convert("L").resize((64, 64)).tobytes())) > 5
    assert all(attributes["alt"] for tag, attributes in reader.tags if tag == "img")
    policy = next(a["content"] for tag, a in reader.tags if tag == "meta" and "http-equiv" in a)
    assert "default-src 'none'" in policy and "script-src" not in policy
    assert not re.search(r"(?:src|href)=.(?!#|data:)", text) and "url(" not in text and "<script" not in text
    assert "&lt;script&gt;" in text and "heads of 24" in text
    rows = [row for row in report.rows()[1]]
    assert all(cell in reader.cells for cell in rows[0] if cell)


def test_pictures_are_named_after_what_they_show(report):
    names = set(report.plot())
    assert {
        "confidence",
        "entropy",
        "attention_distance",
        "l2_distance",
        "cosine",
        "l2",
        "roles",
        "positional",
    } <= names
    assert {f"attention_0_{site.role}_{site.layer}" for site in report.sites} <= names
    assert not {"relevance", "quality", "alphas", "gate_history"} & names


def test_a_folder_with_everything(report, tmp_path, monkeypatch):
    figures = dict(list(report.plot().items())[:2])
    first = pictures_of(report)[:2]
    monkeypatch.setattr(HeadReport, "plot", lambda self: figures)
    for module in ("head_report", "pictures"):
        monkeypatch.setattr(f"collab_heads.analysis.report.{module}.pictures_of", lambda report: first)
    report.save(tmp_path / "out")
    expected = {"report.html", "report.json", *(f"{name}.{kind}" for name in figures for kind in ("png", "svg"))}
    assert {path.name for path in (tmp_path / "out").iterdir()} == expected
    assert (tmp_path / "out" / "report.json").read_text() == report.to_json() + "\n"


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome is installed to open the page in")
def test_in_a_browser(html, tmp_path):
    """Its pictures load without network, the policy lets the style in, and the page is not blank."""
    shot = tmp_path / "page.png"
    where = [f"--user-data-dir={tmp_path / 'profile'}", html.as_uri()]
    subprocess.run([CHROMIUM, *QUIET, f"--screenshot={shot}", *where], check=True, capture_output=True, timeout=120)
    with image.open(shot) as seen:
        assert seen.size == (1000, 1400)
        grey = seen.convert("L").resize((100, 140))
        assert len(set(grey.tobytes())) > 60
        head = seen.crop((0, 0, 1000, 60)).convert("L")
        assert min(head.tobytes()) < 60  # the heading is there
    dump = subprocess.run([CHROMIUM, *QUIET, "--dump-dom", *where], check=True, capture_output=True, timeout=120)
    assert len(pictures(Reader(dump.stdout.decode()))) == len(pictures(Reader(html.read_text(encoding="utf-8"))))
    assert torch.is_grad_enabled()
