"""Track the loss and the time of a training."""

import math
import time

import torch
from accelerate import Accelerator

from collab_heads.base.numerics import float64
from collab_heads.errors import NonFiniteError
from collab_heads.heads.penalty.head_penalty import HeadPenalty

DIVERGED = "lower --learning_rate, or use --mixed_precision bf16 or no"


class Losses:
    """The losses of a training phase: their means are logged to the trackers, and divergence raises NonFiniteError.

    Args:
        accelerator: of the run.
        every: steps between two records.
        phase: of the run.
        total: steps of the phase.
        before: the `state` at the checkpoint from which the phase is resumed; None if that does not record it.
    """

    def __init__(self, accelerator: Accelerator, every: int, phase: int, total: int, before: float | None = 0.0):
        self.accelerator = accelerator
        self.every = every
        self.phase = phase
        self.total = total
        self.sum: torch.Tensor | float = 0.0
        self.count = 0
        # of the whole phase, in float64: the same sum whether or not the run was resumed
        self.is_known = before is not None
        sum_before = before if before is not None and accelerator.is_main_process else 0.0
        self.of_phase = float64(torch.zeros((), device=accelerator.device)) + sum_before

    def add(
        self, loss: torch.Tensor, step: int, learning_rate: float, penalty: HeadPenalty | None = None
    ) -> float | None:
        """Add this process's loss of a step; log the mean loss, and the metrics of the penalty, when a record is due.

        Returns:
            The mean loss of the steps since the last record, over all processes; None between records.

        Raises:
            NonFiniteError: if the mean is NaN or inf.
        """
        self.sum, self.count = self.sum + loss, self.count + 1
        self.of_phase += loss.to(self.of_phase)
        if step % self.every and step != self.total:
            return None
        mean = float(self.accelerator.reduce(self.sum)) / self.count
        self.sum, self.count = 0.0, 0
        if not math.isfinite(mean):
            raise NonFiniteError(f"the loss is {mean} at step {step}: {DIVERGED}")
        values = {"train_loss": mean, "learning_rate": learning_rate, "phase": self.phase}
        values |= {} if penalty is None else penalty.metrics()
        self.accelerator.log(values, step=self.phase * self.total + step)
        return mean

    def state(self) -> float | None:
        """Return the sum of the losses of the phase so far, None if not known; all processes must call it."""
        return float(self.accelerator.reduce(self.of_phase)) if self.is_known else None


class Clock:
    """A stopwatch that adds up the seconds between `start` and `stop`."""

    def __init__(self):
        self.seconds = 0.0
        self.started = 0.0

    def start(self) -> None:
        self.started = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self.started
