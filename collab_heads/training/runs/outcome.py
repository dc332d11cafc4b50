"""The outcome of a run: its final metrics, its model card, and the distillation from the original model."""

import copy
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel

from collab_heads.base.checks import is_number
from collab_heads.distillation.checkpoint import DistillReport
from collab_heads.distillation.distill import distill
from collab_heads.distillation.examples import check_pair, num_examples
from collab_heads.model.card import README, complete, model_card
from collab_heads.model.loading import backend_options, load_or_explain
from collab_heads.model.marks import is_changed
from collab_heads.training.runs.learner import Learner
from collab_heads.training.storage.output import Output


def final_metrics(results: Mapping[str, object]) -> dict[str, float]:
    """Return the metrics that a run measured last: name -> value."""
    return {name: value for name, value in results.items() if name.startswith("eval_") and is_number(value)}


def write_card(output: Output, model: PreTrainedModel, metrics: Mapping[str, float]) -> None:
    """Write the card of a changed model into the output folder; a card of the user's only gets our sections."""
    if (output.path / README).exists() and not output.owns(README):
        complete(model.config, output.path, metrics=metrics)
    elif is_changed(model.config):
        output.write(README, str(model_card(model, metrics=metrics)).encode("utf-8"))


def save_without_card(learner: Learner, model: PreTrainedModel, folder: Path) -> None:
    """Save a model without its card, which is written when the run is over: these files replace others."""
    learner.save_model(model, folder)
    (folder / README).unlink(missing_ok=True)


BATCH = 32  # examples of a step, over all processes: as `Learner.samples` makes them


def check_original(args: Namespace, model: PreTrainedModel) -> None:
    """Check early, before hours of training, that the model can be distilled from the one that the flags name.

    Raises:
        ArgumentError: if there is no such model, or it does not fit.
    """
    if args.distill_from is not None:
        check_pair(model, original_of(args, model))


def original_of(args: Namespace, model: PreTrainedModel) -> PreTrainedModel:
    """Return the model that a changed one will learn from: the one that the flags name, or a copy of this one."""
    if args.distill_from is None:
        return copy.deepcopy(model)
    remote = {"trust_remote_code": args.trust_remote_code} if args.trust_remote_code else {}
    found = load_or_explain(type(model), args.distill_from, dtype=model.dtype, **backend_options(args), **remote)
    return found.to(model.device)


def learn_from(learner: Learner, original: PreTrainedModel) -> DistillReport:
    """Distil the original into a run's model, on all processes, on training examples without labels."""
    session = learner.session
    steps, accelerator = session.args.distill_steps, session.accelerator
    return distill(
        learner.model,
        original,
        learner.samples(num_examples(steps, BATCH), labels=False),
        steps,
        seed=session.args.seed,
        mixed_precision="bf16" if accelerator.mixed_precision == "bf16" else "no",  # fp16 would need scaled gradients
        accelerator=accelerator,
    )
