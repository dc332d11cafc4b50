"""The GPU benchmark, tried without one: tiny models, every kind of row, and what happens where something is missing."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from pages import ROOT
from transformers.utils import logging

FP32_NOISE = 10  # a lossless change, as a multiple of the difference of stock's own backends; seen: 2
BF16_NOISE = 5  # the same in bfloat16, whose steps are coarse; seen: 1.5
TRY = ["--device", "cpu", "--quick"]
KINDS = ("shared", "per_head", "values", "gates", "alphas", "heads")


@pytest.fixture
def gpu(monkeypatch):
    """The program; it must not write."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("gpu")
    monkeypatch.setattr(module, "write", lambda *_, **__: pytest.fail("results of a try were stored"))
    verbosity = logging.get_verbosity()  # which the program lowers, for good
    yield module
    logging.set_verbosity(verbosity)


@pytest.fixture
def timing(gpu, monkeypatch):
    """What it measures with, in as few rounds as there can be."""
    module = importlib.import_module("gpu_timing")
    monkeypatch.setattr(module, "ROUNDS", (2, 2))
    return module


def test_without_a_device_it_says_so_in_a_line(gpu, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == []
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith("skipped: torch finds no CUDA device")


def test_a_processor_is_not_measured(gpu, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu"])
    assert "--device cpu: only CUDA devices are measured; add --quick" in capsys.readouterr().err


FEW = (  # mode, precision, backend, models, lengths
    *(("exact", precision, "sdpa", ("encoder", "translator"), (128,)) for precision in ("bf16", "fp32")),
    ("encode", "bf16", "sdpa", ("encoder",), (128,)),
    ("decode", "fp32", "sdpa", ("translator",), (128,)),
    ("train", "bf16", "sdpa", ("translator",), (128,)),
)


@pytest.mark.slow
def test_every_mode_and_kind_has_rows(gpu, timing, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "PLAN", FEW)
    rows = gpu.main(TRY)
    assert [row for row in rows if "skipped" in row] == []
    for mode in ("encode", "decode", "train"):
        mine = [row for row in rows if row["mode"] == mode]
        variants = " ".join(row["variant"] for row in mine)
        assert [kind for kind in ("stock", *KINDS) if kind not in variants] == []
        assert all(row["time"] > 0 and row["tokens/s"] > 0 for row in mine)
    exact = [row for row in rows if row["mode"] == "exact"]
    assert {(row["model"], row["precision"]) for row in exact} == {
        (model, precision) for model in ("encoder", "translator") for precision in ("bf16", "fp32")
    }
    bounds = {"bf16": BF16_NOISE, "fp32": FP32_NOISE}
    assert {row["variant"]: row["ratio"] for row in exact if row["ratio"] > bounds[row["precision"]]} == {}
    out = capsys.readouterr().out
    assert out.count("| model | precision |") == 4 and out.endswith("nothing is stored\n")


def test_a_change_that_loses_something_shows(gpu, timing, monkeypatch):
    models = importlib.import_module("gpu_models")
    monkeypatch.setattr(importlib.import_module("gpu_calls"), "LOSSLESS", {"heads": None})
    monkeypatch.setitem(models.LOSSLESS, "heads", models.VARIANTS["half of the heads"])
    rows = gpu.main([*TRY, "--backends", "sdpa", "--modes", "exact", "--models", "encoder"])
    assert len(rows) == 2 and all(row["ratio"] > FP32_NOISE for row in rows)


@pytest.mark.slow
def test_what_cannot_run_is_named_and_the_others_go_on(gpu, timing, monkeypatch, capsys):
    calls = importlib.import_module("gpu_calls")
    load = calls.Bench.load

    def broken(self, setting, variant, backend=None):
        if variant == "gates":
            raise RuntimeError("no kernel for this\nand more")
        return load(self, setting, variant, backend)

    monkeypatch.setattr(calls.Bench, "load", broken)
    monkeypatch.setattr(gpu, "PLAN", [("encode", "fp32", "sdpa", ("encoder",), (128,))])
    rows = gpu.main(TRY)
    assert [row["variant"] for row in rows if "skipped" in row] == ["gates"] and len(rows) > len(KINDS)
    line = "skipped: encode encoder fp32 sdpa 8: RuntimeError: no kernel for this (gates)\n"
    assert line in capsys.readouterr().out


def test_what_the_time_does_not_reach_is_named(gpu, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "PLAN", FEW[2:])
    rows = gpu.main([*TRY, "--minutes", "0"])
    assert len(rows) > len(KINDS) and all("skipped" in row for row in rows)
    assert "the time is up (stock; per_head 1/2" in capsys.readouterr().out


def test_a_batch_is_halved_until_it_fits(timing):
    tried = []

    def measure(batch):
        tried.append(batch)
        if batch > 2:
            raise torch.OutOfMemoryError("no memory")
        return "measured"

    assert timing.halved_until_it_fits(8, measure) == (2, "measured") and tried == [8, 4, 2]
    with pytest.raises(torch.OutOfMemoryError):
        timing.halved_until_it_fits(8, lambda batch: measure(batch + 2))


def test_memory_is_what_a_model_holds_and_what_a_call_adds(timing, monkeypatch):
    device, mib = torch.device("cuda"), 2**20
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 70 * mib)  # this model, and stock
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100 * mib)
    assert round(timing.peak_memory(lambda: None, 20 * mib, device)) == 50
    assert timing.peak_memory(lambda: None, 20 * mib, torch.device("cpu")) is None


@pytest.mark.slow
def test_what_was_measured_is_stored_with_the_device(gpu, monkeypatch):
    properties = SimpleNamespace(name="a device", major=9, minor=0, total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(gpu, "PLAN", [("encode", "fp32", "sdpa", ("encoder",), (128, 512))])
    stored = []
    monkeypatch.setattr(gpu, "write", lambda name, rows, **more: stored.append((name, len(rows), more)))
    rows = gpu.main(["--minutes", "0"])
    assert [(name, count) for name, count, _ in stored] == [("gpu", len(rows) // 2), ("gpu", len(rows))]
    device = stored[-1][2]["device"]
    assert (device["name"], device["capability"], device["memory MiB"]) == ("a device", "9.0", 1024)


def test_a_slower_call_is_slower(timing):
    device = torch.device("cpu")
    found = timing.in_turns(lambda: sum(range(1000)), lambda: sum(range(1_000_000)), device)
    assert found.ratio > 10 and found.seconds > found.stock and len(found.ratios) == 2


def test_what_a_model_holds_is_counted(timing):
    model = torch.nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    assert timing.size_of(model, optimizer) == 4 * 20
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    # two moments of every parameter, and a count of steps for each of the two
    assert timing.size_of(model, optimizer) == 4 * 60 + 8
