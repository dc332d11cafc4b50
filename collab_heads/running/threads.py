"""Leave work to one thread where other programs keep the processors, and several would wait for each other."""

import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from collab_heads.base.checks import is_count
from collab_heads.running.batches import evaluating, naming_batch, num_rows, select

logger = logging.get_logger("transformers.collab_heads")  # below transformers' own: its verbosity counts
ROWS = 8  # of a batch, that are timed
TURNS = 3  # in which one thread must be quicker every time
SHORT = 0.02  # seconds of a pass from which on it matters
MOST = 4096  # threads that a file may ask for


def stored_threads(stored: Any) -> int:
    """Return a number of threads that a file holds; raise ValueError unless it is one."""
    if not (is_count(stored) and stored <= MOST):
        raise ValueError(f"threads is {stored!r:.80}, not a number from 1 to {MOST:,}")
    return stored


def choose_threads(model: PreTrainedModel, batch: Mapping) -> None:
    """Leave one thread to torch if a pass of the model is no quicker with all; call it in `keeping_threads`.

    Beside two busy processes, on two cores, two threads take 2 times as long for a pass of MiniLM, and 3 to 6 times for
    all that `compress` does; alone they take 0.6. Small passes, other devices than the CPU, and a number that the user
    has set (`OMP_NUM_THREADS`) change nothing.

    Args:
        model: the model.
        batch: input dict as the model takes it.

    Raises:
        CalibrationError: if the model cannot take the batch.
    """
    threads = torch.get_num_threads()
    if threads == 1 or model.device.type != "cpu" or os.environ.get("OMP_NUM_THREADS"):
        return
    few = batch if num_rows(batch) is None else select(batch, slice(ROWS))

    def seconds(number: int) -> float:
        torch.set_num_threads(number)
        started = time.perf_counter()
        model(**few)
        return time.perf_counter() - started

    slower: list[float] = []  # how many times as long several threads take
    with evaluating(model), naming_batch(model, 0, few):
        seconds(threads)  # the first pass takes longer than others
        while len(slower) < TURNS:
            alone, together = seconds(1), seconds(threads)
            if alone < SHORT or together < alone:
                return
            slower.append(together / alone)
    torch.set_num_threads(1)
    logger.warning(
        f"one thread is used: {threads} threads take {min(slower):.1f} times as long, as they do beside other busy "
        "programs. OMP_NUM_THREADS, set before Python starts, decides instead"
    )
