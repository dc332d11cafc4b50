"""What is watched in a training: its loss, and its seconds."""

import math
import time

import torch
from accelerate import Accelerator

from collab_heads.base.numerics import float64
from collab_heads.errors import NonFiniteError
from collab_heads.heads.penalty.head_penalty import HeadPenalty

DIVERGED = "lower --learning_rate, or use --mixed_precision bf16 or no"


class Losses:
    """Logs the mean loss of every so many steps to the trackers, and stops a run that has diverged.

    Args:
        accelerator: of the run.
        every: steps between two records.
        phase: of the run.
        total: steps of the phase.
        before: from `state`, of the steps before a checkpoint that the phase goes on from; None if it does not say.
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
        """Add the loss of a step on this process; the numbers of the heads are logged beside it.

        Returns:
            The mean over the steps since the last record, of all processes; None between records.
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
        """The sum over the steps of the phase so far, of all processes, which all call it; None if not known."""
        return float(self.accelerator.reduce(self.of_phase)) if self.is_known else None


class Clock:
    """Adds up the seconds between start and stop."""

    def __init__(self):
        self.seconds = 0.0
        self.started = 0.0

    def start(self) -> None:
        """Start, or go on."""
        self.started = time.perf_counter()

    def stop(self) -> None:
        """Stop."""
        self.seconds += time.perf_counter() - self.started
