"""Watch a training: its loss, and its seconds."""

import math
import time

import torch
from accelerate import Accelerator

from collab_heads.errors import NonFiniteError
from collab_heads.heads.penalty import HeadPenalty

DIVERGED = "lower --learning_rate, or use --mixed_precision bf16 or no"


class Losses:
    """Logs the mean loss of every so many steps to the trackers, and stops a run that has diverged."""

    def __init__(self, accelerator: Accelerator, every: int, phase: int, total: int):
        self.accelerator, self.every, self.phase, self.total = accelerator, every, phase, total
        self.sum, self.count = 0.0, 0

    def add(self, loss: torch.Tensor, step: int, learning_rate: float, penalty: HeadPenalty | None = None) -> None:
        """Add the loss of a step on this process; the numbers of the heads are logged beside it."""
        self.sum, self.count = self.sum + loss, self.count + 1
        if step % self.every and step != self.total:
            return
        mean = float(self.accelerator.reduce(self.sum)) / self.count
        self.sum, self.count = 0.0, 0
        if not math.isfinite(mean):
            raise NonFiniteError(f"the loss is {mean} at step {step}: {DIVERGED}")
        values = {"train_loss": mean, "learning_rate": learning_rate, "phase": self.phase}
        values |= {} if penalty is None else penalty.metrics()
        self.accelerator.log(values, step=self.phase * self.total + step)


class Clock:
    """Adds up the seconds between start and stop."""

    def __init__(self):
        self.seconds, self.started = 0.0, None

    def start(self) -> None:
        """Start, or go on."""
        self.started = time.perf_counter()

    def stop(self) -> None:
        """Stop."""
        self.seconds += time.perf_counter() - self.started
