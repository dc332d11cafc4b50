"""Estimate the steps of `collab-heads shrink` that follow its compression, for the line before them."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from collab_heads.base.estimates import Estimate
from collab_heads.base.option_values import ExportTarget
from collab_heads.command.compressing import Later, distillation_after, time_left
from collab_heads.command.inputs import Loaded
from collab_heads.contract.registry import get_adapter
from collab_heads.evaluation.estimate import estimate_evaluation
from collab_heads.evaluation.task import Task
from collab_heads.serving.export import TARGETS

IN_ENGINE = 0.65  # of PyTorch's time, about


def steps_after(
    args: Namespace, task: Task | None, scored: Sequence[ExportTarget], baseline: ExportTarget | None
) -> list[Later]:
    """Return what estimates the steps: the distillation, the exports, and the scores.

    Args:
        args: the flags.
        task: what is scored; None for nothing.
        scored: the targets whose models are.
        baseline: the target of the original in int8; None without one.
    """
    targets = [*args.to, *([] if baseline is None else [baseline])]
    later: list[Later] = [partial(exports_after, targets)]
    if args.distill_steps:
        later.append(partial(distillation_after, args))
    if task is not None:
        small = time_left(args)
        stock = [1.0] * args.trim + [IN_ENGINE] * (baseline is not None)
        changed = [small] * (1 + bool(args.distill_steps)) + [IN_ENGINE * small] * len(scored)
        later.append(partial(evaluation_after, task, [*stock, *changed]))
    return later


def exports_after(targets: Sequence[ExportTarget], loaded: Loaded, batches: Sequence[Mapping]) -> Estimate:
    """Estimate some exports."""
    generates, sites = loaded.model.can_generate(), len(get_adapter(loaded.model).sites(loaded.model))
    seconds = sum(TARGETS[target].site_seconds[generates] for target in targets) * sites
    return Estimate(seconds, 0.0, torch.get_num_threads())


def evaluation_after(task: Task, times: Sequence[float], loaded: Loaded, batches: Sequence[Mapping]) -> Estimate:
    """Estimate the scores of the original and of other models, whose times are shares of its own."""
    return estimate_evaluation(task, loaded.model, loaded.tokenizer, times)
