"""Whether a model of given sizes can be trained in the memory that there is."""

import os
from pathlib import Path

import torch

from collab_heads.errors import ArgumentError

BYTES = 16  # of a parameter in float32: itself, its gradient, and two moments of Adam
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


def check_memory(parameters: int, sizes: str, cpu: bool) -> None:
    """Check that so many parameters can be trained.

    Args:
        parameters: of the model, about.
        sizes: what they come from, for the message.
        cpu: leave GPUs alone.

    Raises:
        ArgumentError: if they cannot; the message holds what is needed and what there is.
    """
    available, where = memory(cpu)
    if parameters * BYTES > available:
        raise ArgumentError(
            f"{sizes} make a model of {parameters:.3g} parameters: training takes {parameters * BYTES / 1e9:,.0f} GB "
            f"(float32 weights, gradients and two moments), and {where} has {available / 1e9:,.0f} GB: ask for less"
        )


def memory(cpu: bool) -> tuple[int, str]:
    """The bytes that a training can have at most, and where."""
    if torch.cuda.is_available() and not cpu:
        return torch.cuda.get_device_properties(0).total_memory, "the GPU"
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, LIMITS):
        text = path.read_text().strip() if path.is_file() else ""
        sizes += [int(text)] if text.isdigit() else []
    return min(sizes), "this machine"
