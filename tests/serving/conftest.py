"""An exported BERT with token types, made once: tests of what loading it does."""

import pytest

from collab_heads import export
from families import FAMILIES


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")
    place = tmp_path_factory.mktemp("served") / "bert"
    export(FAMILIES["bert"].build(), place)
    return place
