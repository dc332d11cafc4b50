"""Fixtures for tests of served models: an exported BERT with token types, made once, and an engine."""

import pytest

from collab_heads import export
from families import FAMILIES


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")
    place = tmp_path_factory.mktemp("served") / "bert"
    export(FAMILIES["bert"].build(), place)
    return place


@pytest.fixture
def executorch():
    """The engine, which is no part of the tests' packages: pip install executorch."""
    pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")
    return pytest.importorskip("executorch", reason="ExecuTorch is not installed")
