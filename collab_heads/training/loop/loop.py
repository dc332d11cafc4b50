"""The training loop of the scripts: optimizer steps on Accelerate, checkpoints, and an exact way back in.

The gradient of a step is that of the mean loss over all its examples (or tokens), however they are shared out over
micro-batches and processes.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel

from collab_heads.errors import NonFiniteError, OutputError
from collab_heads.heads.penalty.head_penalty import HeadPenalty
from collab_heads.training.data.batches import Step, own_share, shuffled_steps
from collab_heads.training.loop.monitor import DIVERGED, Clock, Losses
from collab_heads.training.loop.optimizer import (
    Loss,
    optimizer_and_schedule,
    optimizer_step,
    own_loss,
    parameter_groups,
)
from collab_heads.training.storage.checkpoint import (
    RESUME,
    load_progress,
    load_state,
    prune_checkpoints,
    save_checkpoint,
)


@dataclass(frozen=True)
class Hooks:
    """What a script gives to the loop.

    Attributes:
        collate: a list of examples -> a batch, a dict of tensors as the model takes it.
        weight: a batch -> how many examples (or tokens) its mean loss is over.
        evaluate: (model, epoch, step) -> None; called after every epoch and at the end.
        save_model: (model, folder) -> None.
        progress: () -> what a checkpoint should record beside its place in the run.
        penalty: number of optimizer steps -> what the training adds for the heads; None for nothing.
        rates: learning rates of what the penalty trains, as `HeadPenalty.groups` takes them.
        before_epoch: (model, epoch, optimizer) -> None, epochs from 1; called before an epoch's first step.
        after_step: (number of the optimizer step) -> None.
        order: epoch, from 0 -> its optimizer steps.
        loss: (model, batch) -> the mean loss of the batch; the model's own.
    """

    collate: Callable[[list], Mapping[str, torch.Tensor]]
    weight: Callable[[Mapping[str, torch.Tensor]], int]
    evaluate: Callable[[PreTrainedModel, int, int], None]
    save_model: Callable[[PreTrainedModel, Path], None]
    progress: Callable[[], dict]
    order: Callable[[int], list[Step]]
    penalty: Callable[[int], HeadPenalty] | None = None
    rates: Mapping[str, float | None] = field(default_factory=dict)
    before_epoch: Callable[[PreTrainedModel, int, torch.optim.Optimizer], None] | None = None
    after_step: Callable[[int], None] | None = None
    loss: Loss = own_loss


@dataclass(frozen=True)
class Trained:
    """What a phase of training took.

    Attributes:
        steps: optimizer steps of the phase.
        examples: since the phase was begun or gone on with.
        seconds: since then, without evaluation and saving.
        loss: the mean over all steps of the phase, those before a checkpoint included, of the model's loss, without
            what a penalty adds; None without steps.
    """

    steps: int
    examples: int
    seconds: float
    loss: float | None


def order_of(args: Namespace, examples: Dataset, share: int, phase: int) -> Callable[[int], list[Step]]:
    """Epoch, from 0 -> its optimizer steps of `share` batches of so many examples."""
    lengths = [len(ids) for ids in examples["input_ids"]] if args.group_by_length else None
    return partial(
        shuffled_steps, len(examples), args.per_device_train_batch_size, share, args.seed + phase, lengths=lengths
    )


def num_steps(args: Namespace, order: Callable[[int], list[Step]]) -> int:
    """Optimizer steps of a whole phase."""
    if args.max_train_steps is not None:
        return args.max_train_steps
    whole = int(args.num_train_epochs)
    rest = args.num_train_epochs - whole
    return sum(len(order(epoch)) for epoch in range(whole)) + (math.ceil(rest * len(order(whole))) if rest else 0)


def place(order: Callable[[int], list[Step]], done: int) -> tuple[int, int]:
    """The epoch that an optimizer step is in, from 0, and how many steps of it come before."""
    epoch = 0
    while done >= (length := len(order(epoch))):
        epoch, done = epoch + 1, done - length
    return epoch, done


def fine_tune(
    accelerator: Accelerator,
    model: PreTrainedModel,
    examples: Dataset,
    args: Namespace,
    hooks: Hooks,
    *,
    phase: int = 0,
    resume: tuple[Path, int] | None = None,
) -> Trained:
    """Train a model in place.

    Args:
        accelerator: made with `step_scheduler_with_optimizer=False`.
        model: on any device; it ends on the accelerator's, unwrapped.
        examples: the encoded training set.
        args: from `add_training_arguments` and `add_output_arguments`.
        hooks: what the script does.
        phase: which training of the run this is, for the names of checkpoints and the order of the examples.
        resume: a checkpoint of this phase, and its optimizer step.

    Raises:
        NonFiniteError: when the loss is NaN or inf.
    """
    order = hooks.order
    total = num_steps(args, order)
    warmup = args.num_warmup_steps if args.warmup_ratio is None else math.ceil(args.warmup_ratio * total)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    set_seed(args.seed + phase, device_specific=True)  # dropout differs between processes
    penalty = None if hooks.penalty is None else hooks.penalty(total)
    groups = parameter_groups(model, args.weight_decay, penalty, **hooks.rates)
    wrapped, optimizer, schedule = accelerator.prepare(
        model,
        *optimizer_and_schedule(
            groups, args.learning_rate, args.lr_scheduler_type, warmup, total, scaled=accelerator.scaler is not None
        ),
    )
    done, before = 0, 0.0
    if resume is not None:
        load_state(accelerator, resume[0])
        done, progress = resume[1], load_progress(resume[0])
        before = progress.get("loss_of_phase")
        if penalty is not None:
            load_penalty(penalty, resume[0])
    bar = tqdm(total=total, initial=done, desc="training", disable=not accelerator.is_main_process)
    clock, seen = Clock(), 0
    losses = Losses(accelerator, args.logging_steps, phase, total, before)
    epoch, first = place(order, done)
    while done < total:
        if hooks.before_epoch is not None and not first:
            hooks.before_epoch(model, epoch + 1, optimizer)
        steps = order(epoch)[first : first + total - done]
        epoch, first = epoch + 1, 0
        own = [own_share(step, accelerator.process_index, accelerator.num_processes) for step in steps]
        loader = iter(micro_batches(examples, own, hooks.collate, args.dataloader_num_workers, accelerator.device))
        wrapped.train()
        clock.start()
        for step, mine in zip(steps, own, strict=True):
            batches = [next(loader) for _ in mine]
            weights = [hooks.weight(batch) if indices else 0 for batch, indices in zip(batches, mine, strict=True)]
            loss = optimizer_step(
                accelerator, wrapped, optimizer, batches, weights, args.max_grad_norm, penalty, hooks.loss
            )
            if not accelerator.optimizer_step_was_skipped:
                schedule.step()
            done += 1
            if hooks.after_step is not None:
                hooks.after_step(done)
            seen += sum(len(indices) for indices in step)
            bar.update()
            if (mean := losses.add(loss, done, schedule.get_last_lr()[0], penalty)) is not None:
                watched = {"loss": mean} | ({} if penalty is None else penalty.metrics())
                bar.set_postfix_str(", ".join(f"{name} {v:.4g}" for name, v in watched.items() if "/" not in name))
            last = step is steps[-1]
            due = isinstance(args.checkpointing_steps, int) and done % args.checkpointing_steps == 0
            evaluates = done % args.eval_steps == 0 or done == total if args.eval_steps else last
            if due or evaluates:
                clock.stop()
                if evaluates:
                    hooks.evaluate(accelerator.unwrap_model(wrapped, keep_fp32_wrapper=True), epoch, done)
                if due:  # after the evaluation, which is part of it
                    save(accelerator, wrapped, args, hooks, f"step_{phase}_{done}", phase, done, penalty, losses)
                clock.start()
        clock.stop()
        if args.checkpointing_steps == "epoch":
            save(accelerator, wrapped, args, hooks, f"epoch_{phase}_{epoch}", phase, done, penalty, losses)
    bar.close()
    loss_of_phase = losses.state()
    if penalty is not None:
        penalty.close()
    for name in ("forward", "_original_forward", "_is_accelerate_prepared"):
        vars(model).pop(name, None)  # else the next phase would run without mixed precision
    model.eval()
    accelerator.free_memory()
    return Trained(total, seen, clock.seconds, None if loss_of_phase is None or not total else loss_of_phase / total)


def load_penalty(penalty: HeadPenalty, checkpoint: Path) -> None:
    """Go on with a penalty where a checkpoint was, or raise OutputError."""
    try:
        penalty.load_state_dict(load_progress(checkpoint).get("penalty"))
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise OutputError(f"{RESUME}: {checkpoint}: what it records of the penalty is damaged: {error!r}") from error


def micro_batches(examples, steps, collate, workers, device):
    """Load the micro-batches of this process, one after the other; an empty one is stood in for by an example."""
    indices = [batch or [0] for step in steps for batch in step]
    loader = DataLoader(
        examples,
        batch_sampler=indices,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # starting to load must not draw from the one that dropout draws from
    )
    for batch in loader:
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def weight_bytes(model: PreTrainedModel) -> int:
    """About how much a stored model takes."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def save(accelerator, wrapped, args, hooks, name, phase, step, penalty, losses) -> None:
    """Write a checkpoint and delete those that are too many: never a good one for one of NaN."""
    model, output_dir = accelerator.unwrap_model(wrapped), Path(args.output_dir)
    if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
        raise NonFiniteError(f"weights are NaN or inf at step {step}: {DIVERGED}")
    progress = {"phase": phase, "step": step, "processes": accelerator.num_processes, **hooks.progress()}
    progress["loss_of_phase"] = losses.state()
    progress["penalty"] = None if penalty is None else penalty.state_dict()
    size = 3 * weight_bytes(model)  # with the two moments of AdamW
    save_checkpoint(accelerator, output_dir / name, lambda folder: hooks.save_model(model, folder), progress, size)
    if accelerator.is_main_process:
        prune_checkpoints(output_dir, args.save_total_limit, output_dir / name)
