"""Apply the flags of gates, pruning, alphas and rotation to a model."""

import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel

from collab_heads.analysis.inspect import inspect
from collab_heads.base.processes import agreed, copy_from_first
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ArgumentError
from collab_heads.heads.alpha import mixed_sites, swap_to_alpha
from collab_heads.heads.criteria import criterion_of, head_importance, most_important
from collab_heads.heads.gating import gated_sites, swap_to_gated
from collab_heads.heads.penalty.parts import role_weights
from collab_heads.heads.prune import prune_heads
from collab_heads.heads.report import AlphaReport, PruneReport
from collab_heads.heads.selection import alive_choice, check_target, roles_of_heads
from collab_heads.rotation.head_rotation import HeadRotation
from collab_heads.sites.record import CollabConfig
from collab_heads.sites.site import ROLES, AttentionSite, select_sites
from collab_heads.training.options.heads import OF_ROTATE, acts_in_training, learns_gates, read_alive, wants_gates

Samples = Callable[[int], Sequence[Mapping]]  # a number of examples -> labelled batches


def check_gateable(args: Namespace, model: PreTrainedModel) -> None:
    """Check early, before anything is written, that the model has the sites and heads that the flags name."""
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
    """Return the choice of `--alive_heads`: path -> 0 or 1 for every head; None without the flag."""
    if args.alive_heads is None:
        return None
    return alive_choice(get_adapter(model).sites_with_heads(model), read_alive(args.alive_heads))


def sites_to_gate(args: Namespace, model: PreTrainedModel) -> list[AttentionSite]:
    """Return the sites whose heads are chosen: those that the flags name, else all that `--alive_heads` leaves open."""
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
    """Put gates on the heads, or choose heads and remove the others at once.

    Args:
        accelerator: the first process chooses for all.
        args: the flags.
        model: the model.
        samples: a number of examples -> labelled batches, for importance.

    Returns:
        The report on what was removed; None if all gates are still to be learned.
    """
    learned = [site.path for site in sites_to_gate(args, model)] if learns_gates(args) else []
    report = None
    if args.alive_heads is not None or not learned:
        alive = agreed(accelerator, lambda: heads_to_keep(args, model, samples))
        swap_to_gated(model, alive_heads=alive)
        refits = args.alive_heads is None and criterion_of(args.head_selection).refits
        report = prune_heads(model, batches=samples(args.importance_samples) if refits else None)
        copy_from_first(accelerator, model.parameters())
    if learned:
        swap_to_gated(model, sites=learned)
    return report


def importance_before_training(
    accelerator: Accelerator, args: Namespace, model: PreTrainedModel, samples: Samples
) -> Mapping | None:
    """Return the importance of every head, from which learning a number of heads begins; None without one.

    Its arguments are those of `choose_heads`.
    """
    if args.target_heads is None or not args.importance_samples:
        return None
    return agreed(accelerator, lambda: head_importance(model, samples(args.importance_samples)))


def heads_to_keep(args: Namespace, model: PreTrainedModel, samples: Samples) -> Mapping:
    """Return the heads that the flags choose to keep, as `swap_to_gated` takes them."""
    if args.alive_heads is not None:
        return read_alive(args.alive_heads)
    paths = [site.path for site in sites_to_gate(args, model)]
    criterion = criterion_of(args.head_selection, seed=args.seed)
    batches = samples(args.importance_samples) if criterion.needs_batches else ()
    scores = head_importance(model, batches, criterion=criterion)
    return most_important(model, {path: scores[path] for path in paths}, args.target_heads)


def gate_options(args: Namespace, total: int, scores: Mapping | None) -> dict[str, Any]:
    """Return the arguments of a `HeadPenalty` that concern gates.

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
    """Remove the heads that training closed; return what the gates say, and the report on what was removed."""
    return inspect(model).gates.to_dict(), prune_heads(model)


def check_mixable(args: Namespace, model: PreTrainedModel) -> None:
    """Check early, before anything is written, that the model allows what the flags ask of alphas and folding."""
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
    return select_sites(get_adapter(model).sites_with_heads(model), args.alpha_sites)


def put_alphas(args: Namespace, model: PreTrainedModel) -> AlphaReport | None:
    """Put alphas on the chosen sites that still have two or more heads; return None if there are none."""
    left = get_adapter(model).sites_with_heads(model)
    named = [*ROLES, *(site.path for site in left)] if args.alpha_sites is None else args.alpha_sites
    paths = [site.path for site in left if site.num_heads > 1 and (site.role in named or site.path in named)]
    return swap_to_alpha(model, sites=paths) if paths else None


def alpha_options(args: Namespace, model: PreTrainedModel, total: int) -> dict[str, Any]:
    """Return the arguments of a `HeadPenalty` for alphas and disagreement, in `total` optimizer steps."""
    adapter, disagreement = get_adapter(model), args.disagreement_weight
    if isinstance(disagreement, dict):
        several = {site.role for site in adapter.sites_with_heads(model) if site.num_heads > 1}
        disagreement = {role: weight for role, weight in disagreement.items() if role in several}
    options: dict[str, Any] = {"disagreement": disagreement}
    roles = {site.role for site, _ in mixed_sites(model, adapter)}
    if args.alpha_mixing and roles:
        growth = args.alpha_growth_weight or 0.0
        if isinstance(growth, dict):
            growth = {role: weight for role, weight in growth.items() if role in roles}  # others have no alphas
        options |= {"growth": growth, "alpha_start": math.ceil((args.alpha_start or 0) * total)}
        given = {"growth_radius": args.alpha_growth_radius, "growth_beside": args.alpha_growth_beside}
        options |= {name: value for name, value in given.items() if value is not None}
    return options


def rotation_of(args: Namespace, exclude: Iterable[int] | None = None) -> HeadRotation | None:
    """Return the rotation that the flags describe, or None; `exclude`: ids of tokens that do not count in rankings."""
    if args.rotation_schedule:
        return HeadRotation.from_json(args.rotation_schedule)
    if not args.rotate:
        return None
    names = {name: "roles" if name == "sites" else name for name in OF_ROTATE}
    values = {parameter: getattr(args, f"rotation_{name}") for name, parameter in names.items()}
    return HeadRotation(
        policy=args.rotate, seed=args.seed, exclude=exclude, **{k: v for k, v in values.items() if v is not None}
    )


def check_rotating_sites(args: Namespace, model: PreTrainedModel, rotation: HeadRotation) -> None:
    """Raise ArgumentError if heads would rotate where gates and alphas are: gates move with heads, alphas do not."""
    if not (args.alpha_mixing and learns_gates(args)):
        return
    gated = {site.path for site in sites_to_gate(args, model)}
    mixed = {site.path for site in sites_to_mix(args, model)}
    if both := sorted(gated & mixed & rotation.paths(model)):
        raise ArgumentError(
            f"{both[0]} would have gates and alphas, so its heads cannot rotate: name other sites with "
            "--gated_sites, --alpha_sites or --rotation_sites, or choose heads by --head_selection gradient"
        )
