"""The training loop of the scripts: optimizer steps on Accelerate, checkpoints and exact resuming.

The gradient of a step is that of the mean loss over all its examples (or tokens), however they are distributed over
micro-batches and processes.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from collab_heads.data.batches import Step, share_of_process
from collab_heads.training.loop.steps import optimizer_step
from collab_heads.training.loop.training import Hooks, Trained, Training


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
        model: on any device; afterwards it is on the accelerator's device, unwrapped.
        examples: the encoded training set.
        args: the flags of trainings and of their output.
        hooks: the functions and settings of the script.
        phase: which training of the run this is, for the names of checkpoints and the random numbers.
        resume: a checkpoint of this phase, and its optimizer step.
    """
    training = Training(accelerator, model, args, hooks, phase, resume)
    with training.bar:
        stopped = training.stops()  # a resumed training may have met its `stop` already
        if hooks.look is not None and not training.done:
            training.look(0)
        while training.done < training.total and not stopped:
            epoch, first = hooks.steps.position(training.done)
            if hooks.before_epoch is not None and not first:
                hooks.before_epoch(model, epoch + 1, training.optimizer)
            steps = hooks.steps.of_epoch(epoch)[first : first + training.total - training.done]
            training.begin()
            for step, batches, weights in loaded_steps(
                steps, examples, hooks, accelerator, args.dataloader_num_workers
            ):
                loss = optimizer_step(
                    accelerator,
                    training.wrapped,
                    training.optimizer,
                    batches,
                    weights,
                    args.max_grad_norm,
                    training.penalty,
                    hooks.loss,
                )
                training.advance(loss, num_examples=sum(map(len, step)))
                stopped = training.evaluate_and_save(epoch + 1, ends_epoch=step is steps[-1])
                if stopped:
                    break
            training.end_epoch(epoch + 1, whole=not stopped or step is steps[-1])
    return training.finish()


def loaded_steps(
    steps: Sequence[Step], examples: Dataset, hooks: Hooks, accelerator: Accelerator, workers: int
) -> Iterator[tuple[Step, list[Mapping[str, Tensor]], list[int]]]:
    """Yield each optimizer step with this process's micro-batches of it and their weights."""
    shares = [share_of_process(step, accelerator.process_index, accelerator.num_processes) for step in steps]
    batches = micro_batches(examples, shares, hooks, workers, accelerator.device)
    for step, share in zip(steps, shares, strict=True):
        those = [next(batches) for _ in share]
        yield step, those, [hooks.weight(batch) if indices else 0 for batch, indices in zip(those, share, strict=True)]


def micro_batches(
    examples: Dataset, shares: Sequence[Step], hooks: Hooks, workers: int, device: torch.device
) -> Iterator[Mapping[str, Tensor]]:
    """Yield the micro-batches of this process, on its device; the first example stands in for an empty one."""
    loader: DataLoader = DataLoader(
        examples,
        batch_sampler=[indices or [0] for share in shares for indices in share],
        collate_fn=hooks.collate,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # the loader must not draw from the generator of dropout
    )
    for batch in loader:
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
