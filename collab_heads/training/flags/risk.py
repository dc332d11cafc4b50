"""The flags of minimum-risk training."""

import argparse

from collab_heads.checks import check_choice
from collab_heads.errors import ArgumentError
from collab_heads.training.flags.arguments import trains
from collab_heads.training.flags.parsing import count, not_negative
from collab_heads.training.flags.scratch import from_scratch

OBJECTIVES = ("cross_entropy", "minimum_risk")
METRICS = ("bleu", "chrf")
DEFAULTS = {"samples": 50, "sharpness": 5e-3, "metric": "bleu", "cross_entropy": 0.0}


def add_risk_arguments(parser: argparse.ArgumentParser) -> None:
    """What training makes small: the cross-entropy of the references, or the risk of the model's own translations."""
    add = parser.add_argument_group("what training makes small").add_argument
    add(
        "--objective",
        default="cross_entropy",
        metavar="NAME",
        help="cross_entropy of the references; or minimum_risk: translations are sampled from the model, which has to "
        "be a trained one, and the better ones made more probable. It takes many times the memory of a batch: choose "
        "a small --max_tokens, and more --gradient_accumulation_steps",
    )
    add("--risk_samples", type=count, metavar="N", help="translations sampled per sentence (default: 50)")
    add(
        "--risk_sharpness",
        type=not_negative,
        metavar="X",
        help="exponent of their probabilities, which says how much the more probable ones count (default: 0.005)",
    )
    add(
        "--risk_metric",
        metavar="NAME",
        help="what makes a translation good: bleu or chrf, of a sentence (default: bleu)",
    )
    add(
        "--risk_cross_entropy",
        type=not_negative,
        metavar="X",
        help="weight of the cross-entropy of the references, added to the risk (default: 0)",
    )


def check_risk(args: argparse.Namespace) -> None:
    """Check what a single flag cannot know, and fill the defaults in.

    Raises:
        ArgumentError: naming the flag and the way out.
    """
    check_choice("--objective", args.objective, OBJECTIVES)
    given = [f"--risk_{name}" for name in DEFAULTS if getattr(args, f"risk_{name}") is not None]
    if args.objective == "cross_entropy":
        if given:
            raise ArgumentError(f"{', '.join(given)} have no effect without --objective minimum_risk")
        return
    for name, default in DEFAULTS.items():
        if getattr(args, f"risk_{name}") is None:
            setattr(args, f"risk_{name}", default)
    check_choice("--risk_metric", args.risk_metric, METRICS)
    if args.risk_samples < 2:
        raise ArgumentError(f"--risk_samples {args.risk_samples}: there is nothing to choose between: sample 2 or more")
    if from_scratch(args):
        raise ArgumentError(
            "--objective minimum_risk samples translations from the model, and one from scratch makes none yet: train "
            "it with cross-entropy first, then go on from its --output_dir"
        )
    if not trains(args):
        raise ArgumentError("--objective minimum_risk: there are no training steps")
    for name in ("label_smoothing", "word_dropout"):
        if getattr(args, name):
            raise ArgumentError(f"--{name} belongs to cross-entropy: leave it out with --objective minimum_risk")
    if args.alpha_growth_beside == "sum":
        raise ArgumentError("--alpha_growth_beside sum counts target tokens, and --objective minimum_risk sentences")
