"""Peers that quantise: what they are given, the size of what they write, and what their engines make of it."""

import importlib
import types

import pytest
import torch
from model_sizes import FP32_NOISE
from pages import ROOT
from transformers import BertConfig, BertModel

from collab_heads.errors import ArgumentError

DIM, NEURONS, WORDS, POSITIONS = 64, 128, 1000, 32
MATRICES = 2 * (4 * DIM * DIM + 2 * DIM * NEURONS) + DIM * DIM  # of two layers and the pooler
TABLES = (WORDS + POSITIONS + 2) * DIM
SMALL = 2 * (9 * DIM + NEURONS) + 3 * DIM  # biases and norms
SLACK = 0.02  # MB: names, and constants of the graph
PEERS = {  # -> bytes of a matrix and of a table for each weight; the largest relative error of the output, loose
    "ONNX Runtime": (4, 4, FP32_NOISE),
    "ONNX Runtime, int8": (1, 1, 0.06),
    "ONNX Runtime, int8, by column": (1, 1, 0.06),
    "ONNX Runtime, 4 bits": (0.5 + 4.5 / 32, 0.5 + 4.5 / 32, 0.3),
    "ONNX Runtime, 4 bits, int8 inputs": (0.5 + 4.5 / 32, 0.5 + 4.5 / 32, 0.3),
    "ONNX Runtime, 4 bits, HQQ": (0.5 + 8 / 32, 0.5 + 4.5 / 32, 0.3),
    "OpenVINO": (4, 4, FP32_NOISE),
    "NNCF, 8 bits": (1, 1, 0.06),
    "NNCF, 4 bits": (0.5 + 2 / 32, 0.5 + 2 / 32, 0.4),
    "NNCF, 4 bits, scale estimation": (0.5 + 2 / 32, 0.5 + 2 / 32, 0.4),
    "NNCF, 4 bits, GPTQ": (0.5 + 2 / 32, 0.5 + 2 / 32, 0.4),
}


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def peers(program):
    return program("bits_of_peers")


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": DIM, "num_attention_heads": 4, "intermediate_size": NEURONS, "num_hidden_layers": 2}
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=POSITIONS, initializer_range=0.1, **sizes)
    return BertModel(config).eval()


def batch(rows=16, length=12, seed=1):
    ids = torch.randint(5, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[::3, length - 4 :] = 0
    return {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": mask}


class Encoder:
    """An encoder of a tiny model."""

    def __init__(self):
        self.task = types.SimpleNamespace(batches=[batch()])

    def load(self):
        return bert()


@pytest.fixture(scope="module")
def draw():
    """A draw, whose exports are made once."""
    return types.SimpleNamespace(encoder=Encoder(), batches=[batch(seed=seed) for seed in (2, 3)])


def test_sentences_have_no_padding(peers):
    batches = [batch(), batch(rows=7, length=9)]
    found = peers.of_one_length(batches, 4)
    assert all(len(each["input_ids"]) <= 4 and each["attention_mask"].all() for each in found)
    texts = [tuple(row) for each in found for row in each["input_ids"].tolist()]
    wanted = [
        tuple(ids[mask.bool()].tolist())
        for each in batches
        for ids, mask in zip(each["input_ids"], each["attention_mask"], strict=True)
    ]
    assert sorted(texts) == sorted(wanted) and len(found) == 3 + 2 + 1 + 1  # of 12, 8, 9 and 5 tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_quantises_all_weights_and_runs_them(peers, draw, name):
    needed = ("onnxruntime", "onnxscript") if "ONNX" in name else ("openvino", "nncf")
    for package in (*needed, "transformers.exporters.runners"):
        pytest.importorskip(package)
    model, more = peers.PEERS[name](draw, None)
    of_matrix, of_table, bound = PEERS[name]
    pooler = 4 if "ONNX Runtime, 4 bits" in name else of_matrix  # stays in float32
    size = of_matrix * (MATRICES - DIM * DIM) + pooler * DIM * DIM + of_table * TABLES + 4 * SMALL
    assert more["MB"] == pytest.approx(size / 1e6, abs=SLACK)
    assert more["seconds"] > 0
    with torch.no_grad():
        found, wanted = (each(**batch()).last_hidden_state for each in (model, bert()))
    seen = batch()["attention_mask"].bool()
    error = float((found - wanted)[seen].norm() / wanted[seen].norm())
    assert error < bound
    assert error > bound / 20 or bound == FP32_NOISE


@pytest.mark.slow
@pytest.mark.parametrize("name", ("export, int8", "export, int8, OpenVINO"))
def test_an_export_in_integers_is_measured_as_peers_are(program, draw, name):
    for package in ("onnxscript", "openvino", "transformers.exporters.runners"):
        pytest.importorskip(package)
    model, more = program("bytes").METHODS[name](draw, None)
    scales = 2 * (2 * (5 * DIM + NEURONS) + DIM + WORDS + POSITIONS)  # the two kinds of tokens stay in float32
    assert more["MB"] == pytest.approx((MATRICES + TABLES + 6 * DIM + scales + 4 * SMALL) / 1e6, abs=SLACK)
    assert more["parameters"] == MATRICES + TABLES + SMALL and more["seconds"] > 0
    with torch.no_grad():
        found, wanted = (each(**batch()).last_hidden_state for each in (model, bert()))
    seen = batch()["attention_mask"].bool()
    assert 1e-4 < float((found - wanted)[seen].norm() / wanted[seen].norm()) < 0.06


@pytest.mark.slow
def test_four_and_eight_bits_fill_a_size(peers, draw):
    for package in ("openvino", "nncf", "transformers.exporters.runners"):
        pytest.importorskip(package)
    least, most = (peers.PEERS[f"NNCF, {bits} bits"](draw, None)[1]["MB"] for bits in (4, 8))
    size = (least + most) / 2
    _, more = peers.PEERS["NNCF, 4 and 8 bits"](draw, size)
    largest = WORDS * DIM / 2 / 1e6  # what the other bits of the largest weight take
    assert size - largest < more["MB"] <= size
    with pytest.raises(ArgumentError, match="four bits everywhere"):
        peers.PEERS["NNCF, 4 and 8 bits"](draw, least / 2)


def test_a_peer_without_data_is_measured_once(program, monkeypatch):
    module, calls = program("bytes"), []
    judged = program("real_encoder").Judged(
        dict.fromkeys(module.SCORES, 50.0), torch.eye(12), torch.zeros(3, dtype=torch.long)
    )

    class Judge(Encoder):
        def __init__(self, folder):
            super().__init__()

        def judged(self, model):
            return judged

        judged_once = judged

    def method(name):
        def quantised(draw, size):
            calls.append((name, draw.number, size))
            return bert(), {"MB": 1.5, "seconds": 2.0}

        return quantised

    names = ("NNCF, 8 bits", "NNCF, 4 bits, GPTQ", "NNCF, 4 and 8 bits")
    monkeypatch.setattr(module, "METHODS", {name: method(name) for name in names})
    monkeypatch.setattr(module, "Encoder", Judge)
    monkeypatch.setattr(module, "minilm", lambda: "other")
    monkeypatch.setattr(module, "time_shares", lambda model, original, inputs: dict.fromkeys(module.TIMES, 0.5))
    store = program("common").RowStore("bytes", is_tried=True)
    settings = types.SimpleNamespace(model="some", draws=[1, 2], methods=names, sizes=[13.0])
    for _ in range(2):
        module.measure(settings, store)
    assert calls == [
        ("NNCF, 8 bits", 1, None),
        ("NNCF, 4 bits, GPTQ", 1, None),
        ("NNCF, 4 and 8 bits", 1, 13.0),
        ("NNCF, 4 bits, GPTQ", 2, None),
    ]
    assert [row["draw"] for row in store.rows] == [0, 0, 1, 0, 2]
    found = {row["method"]: row for row in module.averaged(store.rows)}
    assert found["NNCF, 4 bits, GPTQ"]["draws"] == 2 and found["NNCF, 8 bits"]["MB"] == 1.5
    assert all(found[name][time] == 0.5 for name in names for time in module.TIMES)


def test_times_are_shares_of_the_original(program, monkeypatch):
    module, inputs = program("bytes"), []
    clock = iter(range(1000))
    monkeypatch.setattr(module.time, "process_time", lambda: float(next(clock)))

    def slow(**given):
        inputs.append({name: tuple(tensor.shape) for name, tensor in given.items()})
        next(clock)

    threads = torch.get_num_threads()
    found = module.time_shares(slow, lambda **given: None, ["input_ids", "attention_mask"])
    assert found == {"time, 1 x 16": 2.0, "time, 32 x 64": 2.0} and torch.get_num_threads() == threads
    assert inputs[0] == {"input_ids": (1, 16), "attention_mask": (1, 16)}
    assert inputs[-1] == {"input_ids": (32, 64), "attention_mask": (32, 64)}
