"""The distillation that the flags describe: what the changed model learns from, and on what."""

import copy
from argparse import Namespace

from transformers import PreTrainedModel

from collab_heads.distillation.distill import distill
from collab_heads.distillation.examples import num_examples
from collab_heads.distillation.pairs import check_pair
from collab_heads.distillation.report import DistillReport
from collab_heads.model.loading import backend_options, load_or_explain
from collab_heads.training.runs.learner import Learner

BATCH = 32  # examples of a step, over all processes: as `Learner.samples` makes them


def check_original(args: Namespace, model: PreTrainedModel) -> None:
    """Check early, before hours of training, that the model can learn from the one that the flags name.

    Raises:
        ArgumentError: if there is no such model, or it does not fit.
    """
    if args.distill_from is not None:
        check_pair(model, original_of(args, model))


def original_of(args: Namespace, model: PreTrainedModel) -> PreTrainedModel:
    """What a model is to learn from when it has been changed: the one that the flags name, or a copy as it is now."""
    if args.distill_from is None:
        return copy.deepcopy(model)
    remote = {"trust_remote_code": args.trust_remote_code} if args.trust_remote_code else {}
    found = load_or_explain(type(model), args.distill_from, dtype=model.dtype, **backend_options(args), **remote)
    return found.to(model.device)


def learn_from(learner: Learner, original: PreTrainedModel) -> DistillReport:
    """Let a run's model learn from its original, on all processes, on training examples without labels."""
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
