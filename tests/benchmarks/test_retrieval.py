"""The benchmark of retrieval: which passage is nearest to a statement, whatever the order of their lengths."""

import importlib

import pytest
import torch
from pages import ROOT

LINES = {  # index, passage, statement, label
    "data/glue/RTE/train.tsv": [
        "head",
        "0\tbbb\tb\tentailment",
        "1\tcc\tcccc\tnot_entailment",
        "2\ta\taaaa\tentailment",
    ],
    "data/glue/RTE/dev.tsv": ["head", "0\tbbb\tbb\tentailment", "1\tdddd\ta\tentailment"],
}


class Task:
    def tokenized(self, texts, rows):
        """Batches of two texts, each as how often it has the letters a to d."""
        counts = [torch.tensor([[text.count(each) for each in "abcd"] for text in texts]).float()]
        return list(counts[0].split(2))


@pytest.fixture
def retrieval(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    program = importlib.import_module("retrieval")
    monkeypatch.setattr(program, "lines_of", LINES.__getitem__)
    monkeypatch.setattr(program, "embed", lambda model, batches: model(torch.cat(batches)))
    return program.Retrieval(Task())


def test_a_statement_finds_the_passage_with_its_letters(retrieval):
    """Three of four: the last one's passage has other letters."""
    assert retrieval.texts == {"bbb", "b", "bb", "a", "aaaa", "dddd"}  # no text of a pair that is not entailed
    assert retrieval.score(torch.nn.functional.normalize) == 75
    assert retrieval.score(lambda counts: torch.nn.functional.normalize(counts.roll(1, dims=-1) + 2 * counts)) == 75


def test_a_model_that_sees_no_letters_finds_the_first_passage_only(retrieval):
    """All are as near, so the first one is taken, which two of the statements have."""
    assert retrieval.score(torch.ones_like) == 50
