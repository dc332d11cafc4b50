"""Alphas, disagreement and folding as the scripts' flags describe them."""

import argparse
import math
from argparse import Namespace

from transformers import PreTrainedModel

from collab_heads.checks import check_choice
from collab_heads.errors import ArgumentError
from collab_heads.heads.alpha import mixed_sites, swap_to_alpha
from collab_heads.heads.penalty.alphas import BESIDE
from collab_heads.heads.penalty.parts import role_weights
from collab_heads.heads.report import AlphaReport
from collab_heads.registry import get_adapter
from collab_heads.sites import ROLES, AttentionSite, select_sites
from collab_heads.state import CollabConfig
from collab_heads.training.flags.arguments import not_negative, per_role, positive, trains
from collab_heads.training.flags.pruning import wants_gates

OF_GROWTH = ("alpha_growth_beside", "alpha_growth_radius")
OF_ALPHAS = ("alpha_sites", "alpha_start", "alpha_growth_weight", *OF_GROWTH, "alpha_learning_rate")


def add_mixing_arguments(parser: argparse.ArgumentParser) -> None:
    """How heads are mixed, and kept apart."""
    group = parser.add_argument_group("mixing heads")
    group.add_argument("--alpha_mixing", action="store_true", help="heads as learned combinations of heads")
    group.add_argument("--alpha_sites", nargs="+", metavar="SITE", help="roles or paths that mix; all")
    group.add_argument("--alpha_start", type=share, metavar="X", help="share of the steps before they learn (0)")
    group.add_argument(
        "--alpha_growth_weight",
        type=per_role(not_negative),
        metavar="G",
        help="gamma, the push on their nuclear norms; or per role: enc-self=0.05,dec-enc=0: the alphas of a role "
        "of 0 never learn, those of one not named learn without a push",
    )
    group.add_argument(
        "--alpha_growth_beside",
        metavar="LOSS",
        help="what gamma stands beside: mean, our loss; sum, one summed over target tokens, as the 40 of Azov and "
        "Landau: gamma is then divided by the target tokens (of classifiers: examples) of each step (mean)",
    )
    group.add_argument(
        "--alpha_growth_radius", type=positive, metavar="R", help="growth in a step from which the push ends (1e-4)"
    )
    group.add_argument("--alpha_learning_rate", type=positive, metavar="LR", help="peak (as --learning_rate)")
    group.add_argument(
        "--disagreement_weight",
        type=per_role(not_negative),
        metavar="X",
        help="of the mean cosine between the outputs of a layer's heads; or per role",
    )
    group.add_argument(
        "--fold_heads", action="store_true", help="gates and alphas into W_O at the end: a stock checkpoint"
    )
    group.add_argument(
        "--save_head_statistics", action="store_true", help="confidence, likeness and alphas of all heads, at the end"
    )


def share(text: str) -> float:
    """Parse a share of the steps, below 1."""
    if not_negative(text) >= 1:
        raise argparse.ArgumentTypeError(f"{text} is a share of the steps, below 1")
    return float(text)


def check_mixing(args: Namespace) -> None:
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
        check_choice("--alpha_growth_beside", args.alpha_growth_beside, BESIDE)
    for flag in ("alpha_mixing", "disagreement_weight"):
        if getattr(args, flag) and not trains(args):
            raise ArgumentError(f"--{flag} acts in training: there are no training steps")
    if args.save_head_statistics and args.output_dir is None:
        raise ArgumentError("--save_head_statistics needs --output_dir")
    if args.fold_heads and args.collaborative:
        raise ArgumentError("--fold_heads makes a stock checkpoint, which cannot be --collaborative")
    if args.fold_heads and not (args.alpha_mixing or wants_gates(args)):
        raise ArgumentError("--fold_heads needs --alpha_mixing, or flags that gate or remove heads")


def acts_in_training(args: Namespace) -> bool:
    """Whether alphas or disagreement add to the training."""
    return args.alpha_mixing or args.disagreement_weight is not None


def check_model(args: Namespace, model: PreTrainedModel) -> None:
    """Check early, before anything is written, that the model has what the flags name.

    Raises:
        CollabHeadsError: if it has not, or has alphas already.
    """
    adapter = get_adapter(model) if acts_in_training(args) or args.fold_heads or args.save_head_statistics else None
    if args.fold_heads and any(state.query_key for state in CollabConfig.of(model.config).sites.values()):
        raise ArgumentError(f"--fold_heads makes a stock checkpoint, and {args.model_name_or_path} is collaborative")
    if args.disagreement_weight is not None:
        role_weights("--disagreement_weight", args.disagreement_weight, adapter.sites_with_heads(model))
    if not args.alpha_mixing:
        return
    if mixed_sites(model, adapter):
        raise ArgumentError(f"{args.model_name_or_path} has alphas already: fold_heads them first")
    sites = chosen_sites(args, model)
    if single := [site.path for site in sites if site.num_heads < 2]:
        raise ArgumentError(f"{', '.join(single)}: a single head cannot be mixed: name others with --alpha_sites")
    role_weights("--alpha_growth_weight", args.alpha_growth_weight, sites)


def chosen_sites(args: Namespace, model: PreTrainedModel) -> list[AttentionSite]:
    """The sites whose heads may be mixed."""
    return select_sites(get_adapter(model).sites_with_heads(model), args.alpha_sites)


def start(args: Namespace, model: PreTrainedModel) -> AlphaReport | None:
    """Put alphas on the chosen sites that have two heads left or more; None if there are none."""
    left = get_adapter(model).sites_with_heads(model)
    named = [*ROLES, *(site.path for site in left)] if args.alpha_sites is None else args.alpha_sites
    paths = [site.path for site in left if site.num_heads > 1 and (site.role in named or site.path in named)]
    return swap_to_alpha(model, sites=paths) if paths else None


def penalty_options(args: Namespace, model: PreTrainedModel, total: int) -> dict[str, object]:
    """What a `HeadPenalty` of a training of `total` optimizer steps is told."""
    adapter, disagreement = get_adapter(model), args.disagreement_weight
    if isinstance(disagreement, dict):
        several = {site.role for site in adapter.sites_with_heads(model) if site.num_heads > 1}
        disagreement = {role: weight for role, weight in disagreement.items() if role in several}
    options: dict[str, object] = {"disagreement": disagreement}
    roles = {site.role for site, _ in mixed_sites(model, adapter)}
    if args.alpha_mixing and roles:
        growth = args.alpha_growth_weight or 0.0
        if isinstance(growth, dict):
            growth = {role: weight for role, weight in growth.items() if role in roles}  # others lost their heads
        options |= {"growth": growth, "alpha_start": math.ceil((args.alpha_start or 0) * total)}
        asked = {"growth_radius": args.alpha_growth_radius, "growth_beside": args.alpha_growth_beside}
        options |= {name: value for name, value in asked.items() if value is not None}
    return options
