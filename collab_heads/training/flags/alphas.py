"""The flags of alphas, disagreement, folding and statistics of heads."""

import argparse
from argparse import Namespace

from collab_heads.checks import check_choice
from collab_heads.errors import ArgumentError
from collab_heads.training.flags.arguments import trains
from collab_heads.training.flags.collaborative import wants_swap
from collab_heads.training.flags.parsing import not_negative, per_role, positive, share_of_steps
from collab_heads.training.flags.pruning import wants_gates
from collab_heads.words import LOSS_KINDS

OF_GROWTH = ("alpha_growth_beside", "alpha_growth_radius")
OF_ALPHAS = ("alpha_sites", "alpha_start", "alpha_growth_weight", *OF_GROWTH, "alpha_learning_rate")


def add_alpha_arguments(parser: argparse.ArgumentParser) -> None:
    """How heads are mixed, and kept apart."""
    group = parser.add_argument_group("mixing heads")
    add = group.add_argument
    add("--alpha_mixing", action="store_true", help="learn to replace every head by a combination of its layer's heads")
    add(
        "--alpha_sites",
        nargs="+",
        metavar="SITE",
        help="where heads are mixed: roles (enc-self, dec-self, dec-enc) or module paths (default: everywhere)",
    )
    add(
        "--alpha_start",
        type=share_of_steps,
        metavar="X",
        help="share of the steps after which the alphas begin to learn (default: 0)",
    )
    add(
        "--alpha_growth_weight",
        type=per_role(not_negative),
        metavar="G",
        help="gamma: how strongly the nuclear norms of the alphas are pushed to grow, one number or one per role, such "
        "as enc-self=0.05,dec-enc=0. A role of 0 keeps its alphas fixed; a role that is not named learns without a "
        "push (default: no push)",
    )
    add(
        "--alpha_growth_beside",
        metavar="LOSS",
        help="the loss that gamma is meant for: mean, as here; sum, over the target tokens of a step, as the 40 of "
        "Azov and Landau: gamma is then divided by their number (for classifiers, by the examples) (default: mean)",
    )
    add(
        "--alpha_growth_radius",
        type=positive,
        metavar="R",
        help="no push in a step in which the norm has grown by this much (default: 1e-4)",
    )
    add(
        "--alpha_learning_rate",
        type=positive,
        metavar="LR",
        help="peak learning rate of the alphas (default: --learning_rate)",
    )
    add(
        "--disagreement_weight",
        type=per_role(not_negative),
        metavar="X",
        help="weight of a penalty for heads of a layer whose outputs are alike (mean cosine), one number or one per "
        "role (default: no penalty)",
    )
    add(
        "--fold_heads",
        action="store_true",
        help="at the end, multiply gates and alphas into the output projection: a checkpoint that loads without this "
        "package",
    )
    add(
        "--save_head_statistics",
        action="store_true",
        help="at the end, write confidence, similarity and alphas of all heads to head_statistics/",
    )


def check_alpha_flags(args: Namespace) -> None:
    """Check what a single flag cannot know.

    Raises:
        ArgumentError: naming the flag and the way out.
    """
    given = [f"--{flag}" for flag in OF_ALPHAS if getattr(args, flag) is not None]
    if given and not args.alpha_mixing:
        raise ArgumentError(f"{', '.join(given)} need --alpha_mixing")
    for flag in OF_GROWTH:
        if getattr(args, flag) is not None and args.alpha_growth_weight is None:
            raise ArgumentError(f"--{flag} needs --alpha_growth_weight")
    if args.alpha_growth_beside is not None:
        check_choice("--alpha_growth_beside", args.alpha_growth_beside, LOSS_KINDS)
    for flag in ("alpha_mixing", "disagreement_weight"):
        if getattr(args, flag) and not trains(args):
            raise ArgumentError(f"--{flag} acts in training: there are no training steps")
    if args.save_head_statistics and args.output_dir is None:
        raise ArgumentError("--save_head_statistics needs --output_dir")
    if args.fold_heads and wants_swap(args):
        raise ArgumentError("--fold_heads makes a stock checkpoint, which cannot be --collaborative or compressed")
    if args.alpha_mixing and args.compress_budget is not None and args.swap == "after":
        raise ArgumentError("--compress_budget cannot compress mixed heads: --swap before or between mixes afterwards")
    if args.fold_heads and not (args.alpha_mixing or wants_gates(args)):
        raise ArgumentError("--fold_heads needs --alpha_mixing, or flags that gate or remove heads")


def acts_in_training(args: Namespace) -> bool:
    """Whether alphas or disagreement add to the training."""
    return args.alpha_mixing or args.disagreement_weight is not None
