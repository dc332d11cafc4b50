"""Memory that was freed goes back to the system, where the C library keeps it; elsewhere nothing happens."""

import os
import resource
from pathlib import Path

import pytest
import torch

from collab_heads.base import memory
from collab_heads.base.memory import find_trim, give_back_memory

COUNT, SIZE = 1024, 100_000  # too small for glibc to take each from the system alone


def resident():
    """The bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(find_trim() is None or "LD_PRELOAD" in os.environ, reason="glibc does not hold the memory")
def test_holes_between_what_stays_are_given_back():
    held = [torch.ones(SIZE, dtype=torch.uint8) for _ in range(COUNT)]
    held = held[::8]
    before = resident()
    give_back_memory()
    assert before - resident() > COUNT * SIZE / 2
    assert all(each.min() == 1 for each in held)


def test_without_glibc_nothing_happens(monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert find_trim.__wrapped__() is None
    monkeypatch.setattr(memory, "find_trim", lambda: None)
    give_back_memory()
