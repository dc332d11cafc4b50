"""One training of a model: optimizer, schedule, penalty and counters, and when it is evaluated and saved."""

import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.base.numerics import float64
from collab_heads.base.progress import progress_bar
from collab_heads.errors import NonFiniteError, OutputError
from collab_heads.heads.penalty.head_penalty import HeadPenalty
from collab_heads.heads.whole import is_sharded, keep_whole
from collab_heads.training.loop.steps import (
    HeadRates,
    Loss,
    TrainingSteps,
    adam_options,
    model_loss,
    optimizer_and_schedule,
    parameter_groups,
    random_states_kept,
)
from collab_heads.training.storage.checkpoint import (
    RESUME,
    load_progress,
    load_state,
    prune_checkpoints,
    save_checkpoint,
    weight_bytes,
)
from collab_heads.training.storage.sharding import become, whole_copy

DIVERGED = "lower --learning_rate, or use --mixed_precision bf16 or no"


@dataclass(frozen=True)
class Hooks:
    """The functions and settings that a script passes to the training loop.

    Attributes:
        collate: a list of examples -> a batch, a dict of tensors as the model takes it.
        weight: a batch -> the number of examples (or tokens) over which its loss is the mean.
        evaluate: (model, epoch, step) -> None; called after every epoch or every `--eval_steps` steps, and at the end.
        save_model: (model, folder) -> None.
        progress: () -> what a checkpoint records beside phase and step.
        steps: the optimizer steps of the training.
        penalty: number of optimizer steps -> the penalty for the heads, or None; None for no penalty.
        rates: learning rates of gates and alphas, as `HeadPenalty.groups` takes them.
        before_epoch: (model, epoch, optimizer) -> None, epochs from 1; called before an epoch's first step.
        after_step: (number of the optimizer step) -> None.
        look: (model, epoch, step) -> None; measures heads: before the first step, every `look_every`, after the last.
        look_every: optimizer steps, or "epoch".
        loss: (model, batch) -> the mean loss of the batch; by default the model's own.
        stop: () -> whether the training ends before its last step; called after evaluations, and on resuming.
        steps_before: optimizer steps that the trainings before took, after which trackers count these.
    """

    collate: Callable[[list], Mapping[str, Tensor]]
    weight: Callable[[Mapping[str, Tensor]], int]
    evaluate: Callable[[PreTrainedModel, int, int], None]
    save_model: Callable[[PreTrainedModel, Path], None]
    progress: Callable[[], dict]
    steps: TrainingSteps
    penalty: Callable[[int], HeadPenalty | None] | None = None
    rates: HeadRates = field(default_factory=lambda: HeadRates())
    before_epoch: Callable[[PreTrainedModel, int, torch.optim.Optimizer], None] | None = None
    after_step: Callable[[int], None] | None = None
    look: Callable[[PreTrainedModel, int, int], None] | None = None
    look_every: int | str | None = None
    loss: Loss = model_loss
    stop: Callable[[], bool] | None = None
    steps_before: int = 0


@dataclass(frozen=True)
class Trained:
    """The counts and the mean loss of a training phase.

    Attributes:
        steps: optimizer steps of the phase.
        examples: seen since the phase was begun or resumed.
        seconds: since then, without evaluations and saving.
        loss: the mean over all steps of the phase, those before a checkpoint included, of the model's loss, without
            what a penalty adds; None without steps.
    """

    steps: int
    examples: int
    seconds: float
    loss: float | None


class Training:
    """One training of a model, prepared with Accelerate; it is counted, evaluated and saved along the way.

    Args:
        accelerator: made with `step_scheduler_with_optimizer=False`.
        model: trained in place.
        args: the flags of trainings and of their output.
        hooks: the functions and settings of the script.
        phase: which training of the run this is.
        resume: a checkpoint of this phase, and its optimizer step.

    Attributes:
        wrapped: the model as Accelerate prepared it.
        kind: the class of the model before FSDP changes it.
        total: optimizer steps of the whole phase.
        done: optimizer steps taken so far.
        examples: number of examples seen since the phase was begun or resumed.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: PreTrainedModel,
        args: Namespace,
        hooks: Hooks,
        phase: int,
        resume: tuple[Path, int] | None = None,
    ):
        self.accelerator = accelerator
        self.model = model
        self.args = args
        self.hooks = hooks
        self.phase = phase
        self.total = hooks.steps.total
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        set_seed(args.seed + phase, device_specific=True)  # dropout differs between processes
        self.penalty = None if hooks.penalty is None else hooks.penalty(self.total)
        groups = parameter_groups(model, args.weight_decay, self.penalty, **hooks.rates)
        warmup = args.num_warmup_steps if args.warmup_ratio is None else math.ceil(args.warmup_ratio * self.total)
        scaled = accelerator.scaler is not None
        prepared = optimizer_and_schedule(
            groups,
            args.learning_rate,
            args.lr_scheduler_type,
            warmup,
            self.total,
            scaled=scaled,
            adam=adam_options(args),
        )
        self.kind = type(model)  # FSDP changes it
        keep_whole(accelerator, model)
        self.wrapped, self.optimizer, self.schedule = accelerator.prepare(model, *prepared)
        self.done = self.examples = 0
        loss_before: float | None = 0.0
        if resume is not None:
            loss_before = self.resume(*resume)
        self.losses = Losses(accelerator, args.logging_steps, phase, self.total, hooks.steps_before, loss_before)
        self.clock = Clock()
        main = accelerator.is_main_process
        self.bar = progress_bar(total=self.total, initial=self.done, desc="training", disable=not main, leave=True)

    def resume(self, checkpoint: Path, step: int) -> float | None:
        """Load the state at a step; return the sum of the losses before it, None if that was not recorded."""
        rates = list(self.schedule.scheduler.base_lrs)
        load_state(self.accelerator, checkpoint)
        self.check_position(checkpoint, step, rates)
        self.done = step
        progress = load_progress(checkpoint)
        if self.penalty is not None:
            try:
                self.penalty.load_state_dict(progress["penalty"])
            except (KeyError, TypeError, AttributeError, RuntimeError) as error:
                damaged = f"what it records of the penalty is damaged: {error!r}"
                raise OutputError(f"{RESUME}: {checkpoint}: {damaged}") from error
        return progress.get("loss_of_phase")

    def check_position(self, checkpoint: Path, step: int, rates: Sequence[float]) -> None:
        """Raise OutputError unless optimizer and schedule, as they were loaded, are at a step, and the rates theirs."""
        schedule = self.schedule.scheduler
        steps = [float(state["step"]) for state in self.optimizer.state.values() if "step" in state]
        last = schedule.last_epoch
        processes = self.accelerator.num_processes  # each advances the schedule
        is_exact = processes == 1 and self.accelerator.mixed_precision != "fp16"  # which skips steps that overflow
        fits = isinstance(last, int) and (last == step if is_exact else 0 <= last <= step * processes)
        if not fits or max(steps, default=0) > step or list(schedule.base_lrs) != list(rates):
            raise OutputError(
                f"{RESUME}: the state in {checkpoint} is damaged: its schedule or its optimizer is not at step {step}, "
                f"or begins with other rates than {rates}"
            )

    def begin(self) -> None:
        """Begin or resume an epoch: switch to training mode and start the clock."""
        self.wrapped.train()
        self.clock.start()

    def advance(self, loss: Tensor, num_examples: int) -> None:
        """Count an optimizer step, advance the schedule, and show and log the loss when it is due."""
        if not self.accelerator.optimizer_step_was_skipped:
            self.schedule.step()
        self.done += 1
        if self.hooks.after_step is not None:
            self.hooks.after_step(self.done)
        self.examples += num_examples
        self.bar.update()
        mean = self.losses.add(loss, self.done, self.schedule.get_last_lr()[0], self.penalty)
        if mean is not None:
            numbers = {"loss": mean} | ({} if self.penalty is None else self.penalty.metrics())
            self.bar.show(", ".join(f"{name} {v:.4g}" for name, v in numbers.items() if "/" not in name))

    def evaluate_and_save(self, epoch: int, *, ends_epoch: bool) -> bool:
        """Evaluate, measure heads and save, each if it is due after the step just taken; the clock is stopped then.

        Returns:
            True if the training ends here.
        """
        every, eval_every = self.args.checkpointing_steps, self.args.eval_steps
        saves = isinstance(every, int) and self.done % every == 0
        evaluates = self.done % eval_every == 0 or self.done == self.total if eval_every else ends_epoch
        looks = self.hooks.look is not None and self.looks(ends_epoch)
        if not (saves or evaluates or looks):
            return False
        self.clock.stop()
        if evaluates:
            self.hooks.evaluate(self.whole(keep_fp32_wrapper=True), epoch, self.done)
        stopped = evaluates and self.stops()
        if looks or (stopped and self.hooks.look is not None):
            self.look(epoch)
        if saves:  # after the evaluation: the checkpoint records it
            self.save(f"step_{self.phase}_{self.done}")
        self.clock.start()
        return stopped

    def looks(self, ends_epoch: bool) -> bool:
        """Return True if the heads are due to be measured after the step just taken."""
        every = self.hooks.look_every
        return self.done == self.total or (self.done % every == 0 if isinstance(every, int) else ends_epoch)

    def look(self, epoch: int) -> None:
        """Measure the heads; the random states are restored afterwards."""
        assert self.hooks.look is not None
        with random_states_kept():
            self.hooks.look(self.whole(keep_fp32_wrapper=True), epoch, self.done)

    def stops(self) -> bool:
        """Return True if the `stop` hook ends the training; it is not asked before the first step."""
        return self.done > 0 and self.hooks.stop is not None and self.hooks.stop()

    def end_epoch(self, epoch: int, *, whole: bool = True) -> None:
        """Save a checkpoint after an epoch, if the flags ask for it and the epoch is complete."""
        self.clock.stop()
        if self.args.checkpointing_steps == "epoch" and whole:
            self.save(f"epoch_{self.phase}_{epoch}")

    def save(self, name: str) -> None:
        """Write a checkpoint, then delete the oldest ones above --save_total_limit."""
        model, output_dir = self.whole(), Path(self.args.output_dir)
        if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
            raise NonFiniteError(f"weights are NaN or inf at step {self.done}: {DIVERGED}")
        progress = {
            "phase": self.phase,
            "step": self.done,
            **self.hooks.progress(),
            "loss_of_phase": self.losses.state(),
            "penalty": None if self.penalty is None else self.penalty.state_dict(),
        }
        save_checkpoint(
            self.accelerator,
            output_dir / name,
            lambda folder: self.hooks.save_model(model, folder),
            progress,
            size=3 * weight_bytes(model),  # with the two moments of AdamW
        )
        if self.accelerator.is_main_process:
            prune_checkpoints(output_dir, self.args.save_total_limit, output_dir / name)

    def finish(self) -> Trained:
        """Unwrap the model in place, put it into evaluation mode, and return the counts of the training."""
        sum_of_losses = self.losses.state()
        if self.penalty is not None:
            self.penalty.close()
        if is_sharded(self.accelerator):
            become(self.model, self.whole())
        without_precision(self.model)  # else the next phase would run without any
        self.model.eval()
        self.accelerator.free_memory()
        loss = None if sum_of_losses is None or not self.done else sum_of_losses / self.done
        return Trained(self.done, self.examples, self.clock.seconds, loss)

    def whole(self, **options: bool) -> PreTrainedModel:
        """Return the model without its distributed wrapper; if its weights are sharded, a copy with full ones."""
        if is_sharded(self.accelerator):
            return whole_copy(self.model, self.kind)
        return self.accelerator.unwrap_model(self.wrapped, **options)


@contextmanager
def as_trained(accelerator: Accelerator, model: PreTrainedModel) -> Iterator[None]:
    """Have a model compute in the mixed precision of its training while the context is open."""
    accelerator.prepare_model(model, evaluation_mode=True)
    try:
        yield
    finally:
        without_precision(model)


def without_precision(model: PreTrainedModel) -> None:
    """Take from a model what Accelerate adds to it for mixed precision, in place."""
    for name in ("forward", "_original_forward", "_is_accelerate_prepared"):
        vars(model).pop(name, None)


class Losses:
    """The losses of a training phase: their means are logged to the trackers, and divergence raises NonFiniteError.

    Args:
        accelerator: of the run.
        every: steps between two records.
        phase: of the run.
        total: steps of the phase.
        steps_before: steps of the phases before.
        before: the `state` at the checkpoint from which the phase is resumed; None if that does not record it.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        every: int,
        phase: int,
        total: int,
        steps_before: int = 0,
        before: float | None = 0.0,
    ):
        self.accelerator = accelerator
        self.every = every
        self.phase = phase
        self.total = total
        self.steps_before = steps_before
        self.sum: Tensor | float = 0.0
        self.count = 0
        # of the whole phase, in float64: the same sum whether or not the run was resumed
        self.is_known = before is not None
        sum_before = before if before is not None and accelerator.is_main_process else 0.0
        self.of_phase = float64(torch.zeros((), device=accelerator.device)) + sum_before

    def add(self, loss: Tensor, step: int, learning_rate: float, penalty: HeadPenalty | None = None) -> float | None:
        """Add this process's loss of a step; log the mean loss, and the metrics of the penalty, when a record is due.

        Returns:
            The mean loss of the steps since the last record, over all processes; None between records.
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
        self.accelerator.log(values, step=self.steps_before + step)
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
