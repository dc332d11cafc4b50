"""The training loop of the scripts: optimizer steps on Accelerate, checkpoints, and an exact way back in.

The gradient of a step is that of the mean loss over all its examples (or tokens), however they are shared out over
micro-batches and processes.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel, get_scheduler

from collab_heads.errors import ArgumentError, NonFiniteError
from collab_heads.training.batches import own_share, shuffled_steps
from collab_heads.training.checkpoint import load_state, prune_checkpoints, save_checkpoint
from collab_heads.training.monitor import DIVERGED, Clock, Losses


@dataclass(frozen=True)
class Hooks:
    """What a script gives to the loop.

    Attributes:
        collate: a list of examples -> a batch, a dict of tensors as the model takes it.
        weight: a batch -> how many examples (or tokens) its mean loss is over.
        evaluate: (model, epoch, step) -> None; called after every epoch and at the end.
        save_model: (model, folder) -> None.
        progress: () -> what a checkpoint should record beside its place in the run.
    """

    collate: Callable[[list], Mapping[str, torch.Tensor]]
    weight: Callable[[Mapping[str, torch.Tensor]], int]
    evaluate: Callable[[PreTrainedModel, int, int], None]
    save_model: Callable[[PreTrainedModel, Path], None]
    progress: Callable[[], dict]


@dataclass(frozen=True)
class Trained:
    """What a phase of training took: optimizer steps, examples, seconds without evaluation and saving."""

    steps: int
    examples: int
    seconds: float


def parameter_groups(model: PreTrainedModel, weight_decay: float) -> list[dict]:
    """The trainable parameters; biases, norms and everything else of one dimension without weight decay."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    plain = {name for name, p in named if p.ndim < 2 or "bias" in name}  # content_bias is a matrix
    groups = [
        {"params": [p for name, p in named if name not in plain], "weight_decay": weight_decay},
        {"params": [p for name, p in named if name in plain], "weight_decay": 0.0},
    ]
    found = [group for group in groups if group["params"]]
    if not found:
        raise ArgumentError("no parameter of the model is trainable")
    return found


def num_steps(args: Namespace, steps_per_epoch: int) -> int:
    """Optimizer steps of a whole phase."""
    if args.max_train_steps is not None:
        return args.max_train_steps
    return math.ceil(args.num_train_epochs * steps_per_epoch)


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
    share = accelerator.num_processes * args.gradient_accumulation_steps
    steps_per_epoch = math.ceil(len(examples) / (share * args.per_device_train_batch_size))
    total = num_steps(args, steps_per_epoch)
    warmup = args.num_warmup_steps if args.warmup_ratio is None else math.ceil(args.warmup_ratio * total)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    set_seed(args.seed + phase, device_specific=True)  # dropout differs between processes
    groups = parameter_groups(model, args.weight_decay)
    wrapped, optimizer, schedule = accelerator.prepare(
        model,
        *optimizer_and_schedule(
            groups, args.learning_rate, args.lr_scheduler_type, warmup, total, scaled=accelerator.scaler is not None
        ),
    )
    lengths = [len(ids) for ids in examples["input_ids"]] if args.group_by_length else None
    done = 0
    if resume is not None:
        load_state(accelerator, resume[0])
        done = resume[1]
    bar = tqdm(total=total, initial=done, desc="training", disable=not accelerator.is_main_process)
    clock, seen = Clock(), 0
    losses = Losses(accelerator, args.logging_steps, phase, total)
    while done < total:
        epoch, first = divmod(done, steps_per_epoch)
        steps = shuffled_steps(
            len(examples), args.per_device_train_batch_size, share, args.seed + phase, epoch, lengths
        )[first : first + total - done]
        own = [own_share(step, accelerator.process_index, accelerator.num_processes) for step in steps]
        loader = iter(micro_batches(examples, own, hooks.collate, args.dataloader_num_workers, accelerator.device))
        wrapped.train()
        clock.start()
        for step, mine in zip(steps, own, strict=True):
            batches = [next(loader) for _ in mine]
            weights = [hooks.weight(batch) if indices else 0 for batch, indices in zip(batches, mine, strict=True)]
            loss = optimizer_step(accelerator, wrapped, optimizer, batches, weights, args.max_grad_norm)
            if not accelerator.optimizer_step_was_skipped:
                schedule.step()
            done += 1
            seen += sum(len(indices) for indices in step)
            bar.update()
            losses.add(loss, done, schedule.get_last_lr()[0])
            due = isinstance(args.checkpointing_steps, int) and done % args.checkpointing_steps == 0
            if due and step is not steps[-1]:
                clock.stop()
                save(accelerator, wrapped, args, hooks, f"step_{phase}_{done}", phase, done)
                clock.start()
        clock.stop()
        epoch = math.ceil(done / steps_per_epoch)
        hooks.evaluate(accelerator.unwrap_model(wrapped, keep_fp32_wrapper=True), epoch, done)
        if due or args.checkpointing_steps == "epoch":  # after the evaluation, which is part of it
            name = f"step_{phase}_{done}" if due else f"epoch_{phase}_{epoch}"
            save(accelerator, wrapped, args, hooks, name, phase, done)
    bar.close()
    for name in ("forward", "_original_forward", "_is_accelerate_prepared"):
        vars(model).pop(name, None)  # else the next phase would run without mixed precision
    model.eval()
    accelerator.free_memory()
    return Trained(total, seen, clock.seconds)


def optimizer_and_schedule(groups, learning_rate, schedule, warmup, total, scaled=False):
    """AdamW, fused where torch can (a fifth of a step's time on a CPU), and its learning rate schedule.

    With a gradient scaler (fp16) it is not fused: a fused step does not tell when it was skipped.
    """
    fused = groups[0]["params"][0].device.type in ("cpu", "cuda") and not scaled
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, fused=fused)
    return optimizer, get_scheduler(schedule, optimizer, num_warmup_steps=warmup, num_training_steps=total)


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


def optimizer_step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Mapping[str, torch.Tensor]],
    weights: Sequence[int],
    max_grad_norm: float,
) -> torch.Tensor:
    """Accumulate the gradient of the mean loss over all micro-batches of all processes, and step.

    Returns:
        The mean loss on this process, times its share of the step: summed over processes it is the step's.
    """
    total = sum(weights)
    if accelerator.num_processes > 1:
        total = int(accelerator.reduce(torch.tensor(total, device=accelerator.device)))
    mean = torch.zeros((), device=accelerator.device)
    for index, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
        last = index == len(batches) - 1
        with nullcontext() if last else accelerator.no_sync(model):
            loss = model(**batch).loss * (weight / total)
            accelerator.backward(loss * accelerator.num_processes)  # DDP takes the mean over processes
        mean += loss.detach()
    if max_grad_norm:
        accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return mean


def save(accelerator, wrapped, args, hooks, name, phase, step) -> None:
    """Write a checkpoint and delete those that are too many: never a good one for one of NaN."""
    model, output_dir = accelerator.unwrap_model(wrapped), Path(args.output_dir)
    if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
        raise NonFiniteError(f"weights are NaN or inf at step {step}: {DIVERGED}")
    progress = {"phase": phase, "step": step, "processes": accelerator.num_processes, **hooks.progress()}
    save_checkpoint(accelerator, output_dir / name, lambda folder: hooks.save_model(model, folder), progress)
    if accelerator.is_main_process:
        prune_checkpoints(output_dir, args.save_total_limit)
