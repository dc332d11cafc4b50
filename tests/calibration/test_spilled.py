"""Calibrations lie in a temporary file and come back as they were, or are computed again where they cannot."""

import shutil
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from compressing import batches_of

from collab_heads import compress
from collab_heads.calibration import calibrate, spilled
from collab_heads.calibration.calibrate import CalibratedSites
from collab_heads.calibration.spilled import Spilled
from families import FAMILIES

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


@dataclass(frozen=True)
class Pair:
    one: object
    other: object


def structure():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(3, 4, generator=generator).mul(3).to(dtype) for dtype in DTYPES]
    pair = Pair(tensors[0].mT, tensors[0][0, 0])  # neither contiguous nor of a dimension
    return {"a": (pair, pair, None), "b": [*tensors, torch.empty(0, 5)], "c": Pair("text", {"d": tensors[0]})}


def assert_equal(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    elif isinstance(expected, Pair):
        assert_equal(vars(found), vars(expected))
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        assert_equal([*found.values()], [*expected.values()])
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


def test_structures_come_back_as_they_were():
    held, first, second = Spilled(100), structure(), {"x": torch.arange(5.0)}
    held.add("first", first)
    held.add("second", second)
    for _ in range(2):
        assert_equal(held.find("first"), first)
        assert_equal(held.find("second"), second)
    found = held.find("first")
    assert found["a"][0] is found["a"][1]  # what was one object is one again
    assert held.find("third") is None
    found["b"][0].zero_()
    assert_equal(held.find("first"), first)


def test_the_file_has_no_name(tmp_path, monkeypatch):
    """So it is gone with the process, however this ends."""
    monkeypatch.setattr(spilled.tempfile, "tempdir", str(tmp_path))
    held = Spilled(100)
    held.add("first", structure())
    assert held.find("first") and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "folder, chosen, on_disk, found",
    [
        ("/tmp", None, True, "disk"),
        ("/tmp", None, False, "/tmp"),
        ("/tmp", "/tmp", True, "/tmp"),
        ("/scratch", None, True, "/scratch"),
    ],
)
def test_the_file_is_on_the_disk_unless_another_place_was_chosen(folder, chosen, on_disk, found, tmp_path, monkeypatch):
    """Many systems have /tmp in memory, which is what a compression has too little of."""
    disk = tmp_path / "disk"
    if on_disk:
        disk.mkdir()
    monkeypatch.setattr(spilled, "ON_DISK", str(disk))
    monkeypatch.setattr(spilled.tempfile, "tempdir", folder)
    monkeypatch.delenv("TMPDIR", raising=False)
    if chosen:
        monkeypatch.setenv("TMPDIR", chosen)
    assert spilled.large_files() == {"disk": str(disk)}.get(found, found)


def full_disk(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=199))


def failing_disk(monkeypatch):
    def write(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(Spilled, "write", write)


@pytest.mark.parametrize("break_disk", [full_disk, failing_disk])
def test_without_room_nothing_is_kept(break_disk, monkeypatch):
    break_disk(monkeypatch)
    held = Spilled(100)
    held.add("first", structure())
    assert held.file is None and held.find("first") is None


def compressed(monkeypatch):
    """Compress in several groups; return the weights, and how often a group was calibrated."""
    calls, inner = [], CalibratedSites.calibrated_anew
    for name, value in {"SHARE": 0, "LEAST": 0}.items():
        monkeypatch.setattr(calibrate, name, value)
    monkeypatch.setattr(
        CalibratedSites, "calibrated_anew", lambda self, group: calls.append(self) or inner(self, group)
    )
    model = FAMILIES["bert"].build().eval()
    compress(model, batches_of(FAMILIES["bert"], 24), 0.5, refine_steps=2)
    return model.state_dict(), len(calls)


@pytest.mark.slow
def test_a_plan_keeps_what_it_calibrates_for_the_fits(monkeypatch):
    kept, calls = compressed(monkeypatch)
    monkeypatch.undo()
    failing_disk(monkeypatch)
    again, more = compressed(monkeypatch)
    layers = FAMILIES["bert"].build().config.num_hidden_layers
    assert calls == 2 * layers  # on the examples to fit to, and on those to measure on
    assert more > calls
    for name, tensor in kept.items():
        assert torch.equal(tensor, again[name]), name
