"""What the flags of alphas and disagreement do to a model."""

import math
from argparse import Namespace
from typing import Any

from transformers import PreTrainedModel

from collab_heads.errors import ArgumentError
from collab_heads.heads.alpha import mixed_sites, swap_to_alpha
from collab_heads.heads.penalty.parts import role_weights
from collab_heads.heads.report import AlphaReport
from collab_heads.record import CollabConfig
from collab_heads.registry import get_adapter
from collab_heads.sites import ROLES, AttentionSite, select_sites
from collab_heads.training.flags.alphas import acts_in_training


def check_mixable(args: Namespace, model: PreTrainedModel) -> None:
    """Check early, before anything is written, that the model has what the flags name.

    Raises:
        CollabHeadsError: if it has not, or has alphas already.
    """
    if not (acts_in_training(args) or args.fold_heads or args.save_head_statistics):
        return
    adapter = get_adapter(model)
    if args.fold_heads and any(state.query_key for state in CollabConfig.on(model).sites.values()):
        raise ArgumentError(f"--fold_heads makes a stock checkpoint, and {args.model_name_or_path} is collaborative")
    if args.disagreement_weight is not None:
        role_weights("--disagreement_weight", args.disagreement_weight, adapter.sites_with_heads(model))
    if not args.alpha_mixing:
        return
    if mixed_sites(model, adapter):
        raise ArgumentError(f"{args.model_name_or_path} has alphas already: fold_heads them first")
    sites = sites_to_mix(args, model)
    if single := [site.path for site in sites if site.num_heads < 2]:
        raise ArgumentError(f"{', '.join(single)}: a single head cannot be mixed: name others with --alpha_sites")
    role_weights("--alpha_growth_weight", args.alpha_growth_weight, sites)


def sites_to_mix(args: Namespace, model: PreTrainedModel) -> list[AttentionSite]:
    """The sites whose heads may be mixed."""
    return select_sites(get_adapter(model).sites_with_heads(model), args.alpha_sites)


def put_alphas(args: Namespace, model: PreTrainedModel) -> AlphaReport | None:
    """Put alphas on the chosen sites that have two heads left or more; None if there are none."""
    left = get_adapter(model).sites_with_heads(model)
    named = [*ROLES, *(site.path for site in left)] if args.alpha_sites is None else args.alpha_sites
    paths = [site.path for site in left if site.num_heads > 1 and (site.role in named or site.path in named)]
    return swap_to_alpha(model, sites=paths) if paths else None


def alpha_options(args: Namespace, model: PreTrainedModel, total: int) -> dict[str, Any]:
    """What a `HeadPenalty` is told of alphas and disagreement in a training of `total` optimizer steps."""
    adapter, disagreement = get_adapter(model), args.disagreement_weight
    if isinstance(disagreement, dict):
        several = {site.role for site in adapter.sites_with_heads(model) if site.num_heads > 1}
        disagreement = {role: weight for role, weight in disagreement.items() if role in several}
    options: dict[str, Any] = {"disagreement": disagreement}
    roles = {site.role for site, _ in mixed_sites(model, adapter)}
    if args.alpha_mixing and roles:
        growth = args.alpha_growth_weight or 0.0
        if isinstance(growth, dict):
            growth = {role: weight for role, weight in growth.items() if role in roles}  # others lost their heads
        options |= {"growth": growth, "alpha_start": math.ceil((args.alpha_start or 0) * total)}
        given = {"growth_radius": args.alpha_growth_radius, "growth_beside": args.alpha_growth_beside}
        options |= {name: value for name, value in given.items() if value is not None}
    return options
