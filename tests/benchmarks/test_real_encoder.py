"""The benchmark of a real sentence encoder: what it compares, and weights that come in an ONNX file."""

import importlib
import types

import pytest
import torch
from pages import ROOT
from transformers import BertConfig, BertModel


@pytest.fixture
def program(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = importlib.import_module("real_encoder")
    monkeypatch.setattr(found, "PLACE", tmp_path / "real_encoder")
    monkeypatch.setattr(found, "WORK", tmp_path)
    return found


def judged(program, vectors, answers):
    unit = torch.nn.functional.normalize(torch.tensor(vectors), dim=-1)
    return program.Judged(dict.fromkeys(program.SCORES, 50.0), unit, torch.tensor(answers))


def test_neighbours_and_answers_are_compared_with_the_original(program, monkeypatch):
    monkeypatch.setattr(program, "NEAREST", 2)
    angles = torch.tensor([0.0, 0.1, 0.3, 0.7, 1.5])
    places = torch.stack((angles.cos(), angles.sin()), dim=-1)
    original = judged(program, places.tolist(), [0, 1, 1, 0])
    assert original.compared(original) == {"flips": 0, "neighbours": 100}
    moved = judged(program, places[[0, 1, 2, 4, 3]].tolist(), [0, 1, 0, 0])
    # two neighbours each: only those of the last two differ, [4, 2] and [2, 1]
    assert moved.compared(original) == {"flips": 25, "neighbours": pytest.approx(80)}


@pytest.fixture
def encoder(program):
    """Each model that it judges has lower scores."""

    class FakeEncoder(program.Encoder):
        def __init__(self):
            self.judgements = []

        def load(self):
            torch.manual_seed(0)
            return torch.nn.Linear(3, 2, bias=False)

        def judged(self, model):
            self.judgements.append(model)
            found = judged(program, torch.eye(12).tolist(), [0, 1])
            return found._replace(scores={name: 90.0 - len(self.judgements) for name in program.SCORES})

    return FakeEncoder()


def test_an_original_is_judged_once(encoder):
    """Whoever asks; other weights, and those of other names, are another's."""
    first, again = (encoder.judged_once(encoder.load()) for _ in range(2))
    assert len(encoder.judgements) == 1 and first.scores == again.scores
    assert torch.equal(first.vectors, again.vectors) and torch.equal(first.answers, again.answers)
    other = encoder.load()
    other.weight.data[0, 0] += 1e-6
    assert encoder.judged_once(other).scores != first.scores
    encoder.judged_once(torch.nn.Sequential(encoder.load()))
    assert len(encoder.judgements) == 3


def test_rows_that_are_there_are_not_measured_again(program, encoder, monkeypatch):
    calls = []

    def halved(draw, budget):
        calls.append((draw.number, budget))
        return program.Made(encoder.load(), encoder, 4.0, {"predicted": 0.1, "measured": 0.2})

    monkeypatch.setattr(program, "Encoder", lambda folder: encoder)
    monkeypatch.setattr(program, "METHODS", {"compress": halved, "int8 alone": halved})
    monkeypatch.setattr(program, "time_share", lambda model, original: 0.5)
    store = importlib.import_module("common").RowStore("real_encoder", is_tried=True)
    settings = {"model": "", "draws": [0, 1], "methods": ["compress", "int8 alone"], "budgets": [0.5]}
    program.measure(types.SimpleNamespace(**settings), store)
    assert calls == [(0, 0.5), (0, None), (1, 0.5)]  # eight bits know no draw
    program.measure(types.SimpleNamespace(**settings), store)
    assert len(calls) == 3 and len(encoder.judgements) == 4 and len(store.rows) == 4
    original, half, bits = program.averaged(store.rows)
    assert original["draws"] == 1 and original["STS-B"] == 89 and "lost, STS-B" not in original
    assert half["draws"] == 2 and half["lost, STS-B"] == 2 and half["seconds"] == 4 and half["parameters"] == 6
    assert bits["budget"] is None and bits["lost, retrieval"] == 2 and half["neighbours"] == 100 and half["time"] == 0.5


@pytest.mark.slow
def test_weights_of_an_onnx_file_are_found_by_their_biases(program, tmp_path):
    onnx = pytest.importorskip("onnx")
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 3, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
    model = BertModel(BertConfig(vocab_size=30_522, **sizes), add_pooling_layer=False)
    weights, nodes, held = model.state_dict(), [], []
    with torch.no_grad():
        for tensor in weights.values():
            tensor.uniform_()
    for number, (name, tensor) in enumerate(weights.items()):
        bias = f"{name.removesuffix('weight')}bias"
        is_matrix = tensor.ndim == 2 and bias in weights
        kept = f"onnx::MatMul_{number}" if is_matrix else f"model.0.auto_model.{name}"
        held.append(onnx.numpy_helper.from_array((tensor.T if is_matrix else tensor).contiguous().numpy(), kept))
        if is_matrix:
            added = [f"model.0.auto_model.{bias}", f"product_{number}"]
            nodes.append(onnx.helper.make_node("MatMul", ["x", kept], [f"product_{number}"]))
            nodes.append(onnx.helper.make_node("Add", added if number % 3 else added[::-1], [f"sum_{number}"]))
    graph = onnx.helper.make_graph(nodes, "bert", [], [], initializer=held)
    onnx.save(onnx.helper.make_model(graph), tmp_path / "bert.onnx")
    found = program.from_onnx(str(tmp_path / "bert.onnx")).state_dict()
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
