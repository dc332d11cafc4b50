"""The states of all random generators that a training may draw from."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Do something; afterwards Python, NumPy and torch, on every device, draw what they would have drawn without it."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
