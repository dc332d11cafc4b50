"""The optimizer steps of a training: how many there are, which examples each takes, and taking one."""

import math
import random
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypedDict

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, get_scheduler

from collab_heads.data.batches import Step, shuffled_steps
from collab_heads.errors import ArgumentError
from collab_heads.heads.adamw import HeadAdamW
from collab_heads.heads.penalty.head_penalty import HeadPenalty
from collab_heads.heads.whole import average_whole


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
        return steps + (math.ceil(round(rest * len(self.of_epoch(whole)), 6)) if rest else 0)  # 1.1 - 1 is above 0.1

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


BETAS = (0.9, 0.999)  # torch's, and the flags' defaults


class HeadRates(TypedDict, total=False):
    """Learning rates of gates and alphas, as `parameter_groups` takes them."""

    gate_lr: float
    alpha_lr: float | None


Loss = Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]


def parameter_groups(
    model: PreTrainedModel,
    weight_decay: float,
    penalty: HeadPenalty | None = None,
    *,
    gate_lr: float = 0.1,
    alpha_lr: float | None = None,
) -> list[dict]:
    """Return the trainable parameters in groups; only matrices have weight decay, and alphas have none.

    Args:
        model: to be trained.
        weight_decay: of matrices; not of biases, norms and other parameters of one dimension, nor of gates and alphas.
        penalty: its gates and alphas are groups of their own.
        gate_lr: learning rate of the gates.
        alpha_lr: learning rate of the alphas; None for that of all other parameters.
    """
    apart = {id(p) for p in ([] if penalty is None else penalty.parameters())}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in apart]
    # content_bias and alphas are matrices
    plain = {name for name, p in named if p.ndim < 2 or "bias" in name or name.endswith(".mixing.alpha")}
    groups = [
        {"params": [p for name, p in named if name not in plain], "weight_decay": weight_decay},
        {"params": [p for name, p in named if name in plain], "weight_decay": 0.0},
    ]
    groups += [] if penalty is None else penalty.groups(gate_lr, alpha_lr)
    if not any(group["params"] for group in groups):
        raise ArgumentError("no parameter of the model is trainable")
    return [group for group in groups if group["params"]]


def optimizer_and_schedule(
    groups: list[dict],
    learning_rate: float,
    schedule: str,
    warmup: int,
    total: int,
    scaled: bool = False,
    adam: Mapping[str, Any] | None = None,
) -> tuple[HeadAdamW, LRScheduler]:
    """Return AdamW and its learning rate schedule.

    AdamW is fused where torch supports it; on a CPU the difference is a fifth of a step's time.

    Args:
        groups: from `parameter_groups`.
        learning_rate: the peak.
        schedule: its name in transformers.
        warmup: optimizer steps in which the rate rises.
        total: optimizer steps in all.
        scaled: whether gradients are scaled (fp16); AdamW is then not fused, since a fused step does not tell that it
            was skipped.
        adam: other arguments of AdamW: `betas`, `eps`.
    """
    fused = groups[0]["params"][0].device.type in ("cpu", "cuda") and not scaled
    optimizer = HeadAdamW(groups, lr=learning_rate, fused=fused, **(adam or {}))
    return optimizer, get_scheduler(schedule, optimizer, num_warmup_steps=warmup, num_training_steps=total)


def adam_options(args: Namespace) -> dict[str, Any]:
    """Return the arguments of AdamW that the flags give, other than its learning rate."""
    given = zip((args.adam_beta1, args.adam_beta2), BETAS, strict=True)
    betas = tuple(default if value is None else value for value, default in given)
    return {"betas": betas} | ({} if args.adam_epsilon is None else {"eps": args.adam_epsilon})


def model_loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss that the model computes itself."""
    return model(**batch).loss


def optimizer_step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Mapping[str, torch.Tensor]],
    weights: Sequence[int],
    max_grad_norm: float,
    penalty: HeadPenalty | None = None,
    loss_of: Loss = model_loss,
) -> torch.Tensor:
    """Accumulate the gradient of the mean loss over all micro-batches of all processes, and take the step.

    Returns:
        The mean loss on this process times its share of the step; the sum over processes is the loss of the step.
    """
    total = sum(weights)
    if accelerator.num_processes > 1:
        total = int(accelerator.reduce(torch.tensor(total, device=accelerator.device)))
    mean = torch.zeros((), device=accelerator.device)
    for index, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
        last = index == len(batches) - 1
        with nullcontext() if last else accelerator.no_sync(model):
            loss = loss_of(model, batch)
            extra = 0.0 if penalty is None else penalty.total(batch, tokens=total)
            accelerator.backward((loss + extra) * (weight / total * accelerator.num_processes))  # DDP takes the mean
        mean += loss.detach() * (weight / total)
    average_whole(accelerator, model)
    if penalty is not None:
        penalty.before_step()
    if max_grad_norm:
        # gates and alphas have scales of their own
        clipped = model.parameters() if penalty is None else penalty.others(model)
        accelerator.clip_grad_norm_(clipped, max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    if penalty is not None:
        penalty.step(skipped=accelerator.optimizer_step_was_skipped)
    return mean
