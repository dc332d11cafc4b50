"""Double precision where the device has it, and threads where they help."""

from contextlib import contextmanager

import torch
from torch import Tensor


def float64(tensor: Tensor) -> Tensor:
    """To double precision, on the CPU where the device has none (Apple's MPS)."""
    return tensor.to("cpu" if tensor.device.type == "mps" else tensor.device, torch.float64)


@contextmanager
def few_threads(size: int):
    """One thread for small problems: on a busy machine the threads of many small solves mostly wait for each other.

    Seen on two busy cores at 12 x 768, R=256: 43 s with two threads, 2 s with one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if size <= 1024 else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
