"""The flags of gates and pruning: which heads to keep."""

import argparse
from argparse import Namespace
from collections.abc import Mapping

from collab_heads.base.checks import check_choice
from collab_heads.base.option_values import CRITERION_WORDS, LOSS_KINDS
from collab_heads.command.flags.arguments import trains
from collab_heads.command.flags.collaborative import wants_swap
from collab_heads.command.flags.parsing import count, not_negative, path, per_role, positive, share_of_steps
from collab_heads.command.flags.signatures import option_adder
from collab_heads.errors import ArgumentError, DataError
from collab_heads.files.reading import parse_json, read_text

SELECTIONS = ("learned", *CRITERION_WORDS)
FLAGS = ("gate_weight", "target_heads", "alive_heads")  # each of them makes the run gate or remove heads


def add_head_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of gates and pruning."""
    group = parser.add_argument_group("heads")
    add = group.add_argument
    add(
        "--target_heads",
        type=per_role(count),
        metavar="N",
        help="keep this many heads: N in the whole model, or per role, such as enc-self=4,dec-self=4,dec-enc=6",
    )
    add(
        "--head_selection",
        default="learned",
        metavar="HOW",
        help="how --target_heads are chosen: learned, by gates that close in training; or before training: gradient, "
        "of the loss; reconstruction, by how well the others can stand in for them, which the output projection then "
        "does, without labels; random",
    )
    add(
        "--gate_weight",
        type=not_negative,
        metavar="X",
        help="instead of a number of heads, a price: lambda per open head. Gates learn which heads are worth it "
        "(concrete_coef of Voita et al., divided by the number of gated modules)",
    )
    add(
        "--alive_heads",
        type=path,
        metavar="FILE",
        help="instead, or for other roles than those that learn gates, a JSON file of heads to keep: role -> for "
        "every layer a list of 0 and 1, or module path -> such a list",
    )
    add(
        "--gated_sites",
        nargs="+",
        metavar="SITE",
        help="where heads may be removed: roles (enc-self, dec-self, dec-enc) or module paths (default: everywhere)",
    )
    option_adder(add, "trainer.head_training", "HeadTraining")(
        "gate_lr", flag="gate_learning_rate", metavar="LR", help="peak learning rate of the gates"
    )
    add(
        "--selection_share",
        type=positive,
        default=0.1,
        metavar="X",
        help="share of the steps in which learned gates go down to --target_heads",
    )
    add(
        "--importance_samples",
        type=count,
        default=256,
        metavar="N",
        help="training examples that rank the heads before training: the choice of --head_selection gradient, and "
        "where learned gates begin; 0: gates begin equal",
    )


def read_alive(path: str) -> dict:
    """Read the JSON file of `--alive_heads`, which names the heads to keep.

    Raises:
        DataError: if the file cannot be read as JSON.
    """
    try:
        return parse_json(read_text(path))
    except ValueError as error:  # a DataError is one, too
        raise DataError(f"--alive_heads {path}: {error}") from error


def wants_gates(args: Namespace) -> bool:
    """Return True if the run gates or removes heads."""
    return any(getattr(args, flag) is not None for flag in FLAGS)


def learns_gates(args: Namespace) -> bool:
    """Return True if gates are trained; otherwise heads are chosen and removed before training."""
    return args.gate_weight is not None or (args.target_heads is not None and args.head_selection == "learned")


def check_heads(args: Namespace) -> None:
    """Check the flags of gates and pruning against each other and the other flags.

    Raises:
        ArgumentError: if flags are wrong or contradict each other; the message names the flag and the way out.
    """
    check_choice("--head_selection", args.head_selection, SELECTIONS)
    given = [f"--{flag}" for flag in FLAGS if getattr(args, flag) is not None]
    if len(given) > 1 and not (given[1:] == ["--alive_heads"] and learns_gates(args)):
        raise ArgumentError(f"{' and '.join(given)} exclude each other: one of them says which heads stay")
    if args.head_selection != "learned" and args.target_heads is None:
        raise ArgumentError(f"--head_selection {args.head_selection} needs --target_heads")
    if args.gated_sites and (given in ([], ["--alive_heads"]) or isinstance(args.target_heads, Mapping)):
        raise ArgumentError(
            "--gated_sites goes with --gate_weight or a total for --target_heads; the others name their own"
        )
    if args.head_selection not in ("learned", "random") and not args.importance_samples:
        raise ArgumentError(f"--head_selection {args.head_selection} needs --importance_samples")
    if args.selection_share > 1:
        raise ArgumentError(f"--selection_share {args.selection_share} is a share, 1 at most")
    if learns_gates(args) and not trains(args):
        flag = "num_train_epochs" if args.max_train_steps is None else "max_train_steps"
        raise ArgumentError(f"gates are learned in training: --{flag} is 0 (or use --head_selection gradient)")
    if given and args.compress_budget is not None:
        raise ArgumentError(f"--compress_budget and {given[0]} exclude each other: it finds the heads that stay itself")
    for flag in ("dim_shared_query_key", "dim_value"):
        asked = getattr(args, flag)
        widths = [each for each in (asked.values() if isinstance(asked, Mapping) else [asked]) if isinstance(each, int)]
        if given and args.collaborative and args.swap == "after" and widths:
            raise ArgumentError(
                f"--{flag} {widths[0]} with --swap after is the width of heads that may be gone by then: "
                "give a share, such as 0.5, or swap before or between"
            )


OF_GROWTH = ("alpha_growth_beside", "alpha_growth_radius")
OF_ALPHAS = ("alpha_sites", "alpha_start", "alpha_growth_weight", *OF_GROWTH, "alpha_learning_rate")


def add_alpha_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of mixing heads, and of penalties that keep them apart."""
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
    """Check the flags of mixing heads against each other and the other flags.

    Raises:
        ArgumentError: if flags are wrong or contradict each other; the message names the flag and the way out.
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
    """Return True if alphas or the disagreement penalty take part in training."""
    return args.alpha_mixing or args.disagreement_weight is not None
