"""The optimizer steps of a training: how many there are, and which examples each takes."""

import math
import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from datasets import Dataset

from collab_heads.data.batches import Step, shuffled_steps


@dataclass(frozen=True)
class TrainingSteps:
    """The optimizer steps of one training.

    Attributes:
        of_epoch: epoch, from 0 -> its optimizer steps.
        num_epochs: passes over the examples; with a fraction the last one is partial.
        max_steps: number of optimizer steps, instead of epochs; None to use `num_epochs`.
    """

    of_epoch: Callable[[int], list[Step]]
    num_epochs: float
    max_steps: int | None = None

    @classmethod
    def shuffled(cls, args: Namespace, examples: Dataset, batches: int, seed: int) -> "TrainingSteps":
        """Make steps of `batches` micro-batches of --per_device_train_batch_size examples, shuffled by the seed."""
        lengths = [len(ids) for ids in examples["input_ids"]] if args.group_by_length else None
        size = args.per_device_train_batch_size
        of_epoch = partial(shuffled_steps, len(examples), size, batches, seed, lengths=lengths)
        return cls(of_epoch, args.num_train_epochs, args.max_train_steps)

    @cached_property
    def total(self) -> int:
        """The number of optimizer steps."""
        if self.max_steps is not None:
            return self.max_steps
        whole = int(self.num_epochs)
        rest = self.num_epochs - whole
        steps = sum(len(self.of_epoch(epoch)) for epoch in range(whole))
        return steps + (math.ceil(rest * len(self.of_epoch(whole))) if rest else 0)

    def position(self, done: int) -> tuple[int, int]:
        """Return the epoch, from 0, of the step after `done` steps, and how many steps of that epoch precede it."""
        epoch = 0
        while done >= (length := len(self.of_epoch(epoch))):
            epoch, done = epoch + 1, done - length
        return epoch, done

    @property
    def epochs_begun(self) -> int:
        """The number of epochs that the training begins."""
        return self.position(self.total - 1)[0] + 1 if self.total else 0


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch, on every device, when the context is closed."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
