"""The pictures of several benchmarks show the stored results."""

import importlib
import io
import re

import pytest
from pages import DOCS, ROOT


@pytest.fixture
def pictures(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("pictures")


@pytest.mark.parametrize("name", ["efficiency", "start", "alternatives"])
def test_a_picture_is_that_of_the_stored_results(name, pictures):
    stored, drawn = (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8"), io.StringIO()
    creator = re.search(r"Matplotlib v([\d.]+)", stored)[1]
    if creator != pictures.matplotlib.__version__:
        pytest.skip(f"the picture was drawn by matplotlib {creator}")
    pictures.DRAWN[name]().savefig(drawn, format="svg")
    shapes = [re.sub(r"<dc:date>.*?</dc:date>", "", text) for text in (stored, drawn.getvalue())]
    assert shapes[0] == shapes[1], "run python benchmarks/pictures.py"
