"""What the flags of gates and pruning do to a model: gate heads, choose them, remove them."""

import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel

from collab_heads.errors import ArgumentError
from collab_heads.heads.choices import alive_choice
from collab_heads.heads.criteria import criterion_of
from collab_heads.heads.gating import gate_report, gated_sites, swap_to_gated
from collab_heads.heads.importance import head_importance, most_important
from collab_heads.heads.prune import prune_heads
from collab_heads.heads.report import PruneReport
from collab_heads.heads.selection import check_target, roles_of_heads
from collab_heads.registry import get_adapter
from collab_heads.sites import AttentionSite, select_sites
from collab_heads.training.flags.pruning import learns_gates, read_alive, wants_gates
from collab_heads.training.storage.reservation import agreed, same_weights

Samples = Callable[[int], Sequence[Mapping]]  # a number of examples -> labelled batches


def check_gateable(args: Namespace, model: PreTrainedModel) -> None:
    """Check early, before anything is written, that the model has the sites and heads that the flags name.

    Raises:
        CollabHeadsError: if it has not, or has gates already.
    """
    if not wants_gates(args):
        return
    adapter = get_adapter(model)
    if gated_sites(model, adapter):
        raise ArgumentError(f"{args.model_name_or_path} has gates already: prune_heads or fold_heads them first")
    fixed = fixed_heads(args, model)
    if args.target_heads is not None:
        check_target(args.target_heads, roles_of_heads(sites_to_gate(args, model)))
    elif fixed is None or learns_gates(args):
        sites_to_gate(args, model)


def fixed_heads(args: Namespace, model: PreTrainedModel) -> dict[str, list[int]] | None:
    """What `--alive_heads` names: path -> for every head 0 or 1; None without."""
    if args.alive_heads is None:
        return None
    return alive_choice(get_adapter(model).sites_with_heads(model), read_alive(args.alive_heads))


def sites_to_gate(args: Namespace, model: PreTrainedModel) -> list[AttentionSite]:
    """The sites whose heads are chosen: those that are named, else all for which no file says which heads stay.

    Raises:
        ArgumentError: if a file says so of one that is named, or of all.
    """
    names = list(args.target_heads) if isinstance(args.target_heads, Mapping) else args.gated_sites
    fixed = fixed_heads(args, model) or {}
    sites = select_sites(get_adapter(model).sites_with_heads(model), names)
    free = [site for site in sites if site.path not in fixed]
    if not free or (names and len(free) < len(sites)):
        both = next(site.path for site in sites if site.path in fixed)
        raise ArgumentError(
            f"--alive_heads {args.alive_heads} says which heads of {both} stay, so there are no gates to learn: take "
            "its role out of the file, or name other roles to learn on"
        )
    return free


def choose_heads(
    accelerator: Accelerator, args: Namespace, model: PreTrainedModel, samples: Samples
) -> PruneReport | None:
    """Gate the model, or choose heads and remove them at once.

    Args:
        accelerator: the first process chooses for all.
        args: the flags.
        model: the model.
        samples: a number of examples -> labelled batches, for importance.

    Returns:
        What was removed; None if all gates are still to be learned.
    """
    learned = [site.path for site in sites_to_gate(args, model)] if learns_gates(args) else []
    report = None
    if args.alive_heads is not None or not learned:
        alive = agreed(accelerator, lambda: heads_to_keep(args, model, samples))
        swap_to_gated(model, alive_heads=alive)
        refits = args.alive_heads is None and criterion_of(args.head_selection).refits
        report = prune_heads(model, batches=samples(args.importance_samples) if refits else None)
        same_weights(accelerator, model)
    if learned:
        swap_to_gated(model, sites=learned)
    return report


def importance_before_training(
    accelerator: Accelerator, args: Namespace, model: PreTrainedModel, samples: Samples
) -> Mapping | None:
    """The importance of every head, from which learning an exact number of heads begins; None without.

    Its arguments are those of `choose_heads`.
    """
    if args.target_heads is None or not args.importance_samples:
        return None
    return agreed(accelerator, lambda: head_importance(model, samples(args.importance_samples)))


def heads_to_keep(args: Namespace, model: PreTrainedModel, samples: Samples) -> Mapping:
    """Which heads stay, as the flags choose them: as `swap_to_gated` takes it."""
    if args.alive_heads is not None:
        return read_alive(args.alive_heads)
    paths = [site.path for site in sites_to_gate(args, model)]
    criterion = criterion_of(args.head_selection, seed=args.seed)
    batches = samples(args.importance_samples) if criterion.needs_batches else ()
    scores = head_importance(model, batches, criterion=criterion)
    return most_important(model, {path: scores[path] for path in paths}, args.target_heads)


def gate_options(args: Namespace, total: int, scores: Mapping | None) -> dict[str, Any]:
    """What a `HeadPenalty` is told of gates.

    Args:
        args: the flags.
        total: optimizer steps of the training.
        scores: from `importance_before_training`.
    """
    if args.gate_weight is not None:
        return {"gate_weight": args.gate_weight}
    steps = max(1, math.ceil(args.selection_share * total))
    return {"target_heads": args.target_heads, "steps": steps, "scores": scores, "seed": args.seed}


def remove_closed_heads(model: PreTrainedModel) -> tuple[dict, PruneReport]:
    """Remove the heads that training closed; returns what the gates say, and what was removed."""
    return gate_report(model).to_dict(), prune_heads(model)
