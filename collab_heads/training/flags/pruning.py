"""Gates and pruning as the scripts' flags describe them."""

import argparse
import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from collab_heads.checks import check_choice
from collab_heads.errors import ArgumentError, DataError
from collab_heads.heads.choices import alive_choice
from collab_heads.heads.gating import gate_report, gated_sites, swap_to_gated
from collab_heads.heads.importance import head_importance, most_important
from collab_heads.heads.prune import prune_heads
from collab_heads.heads.report import PruneReport
from collab_heads.heads.selection import check_target, roles_of_heads
from collab_heads.reading import parse_json
from collab_heads.registry import get_adapter
from collab_heads.sites import AttentionSite, select_sites
from collab_heads.training.flags.arguments import count, not_negative, path, per_role, positive, trains
from collab_heads.training.storage.reservation import agreed

SELECTIONS = ("learned", "importance", "random")
target = per_role(count)
FLAGS = ("gate_weight", "target_heads", "alive_heads")  # each asks for gates, in its own way


def add_head_arguments(parser: argparse.ArgumentParser) -> None:
    """Which heads to keep."""
    group = parser.add_argument_group("heads")
    group.add_argument(
        "--target_heads",
        type=target,
        metavar="N",
        help="keep N heads in all, or per role: enc-self=4,dec-self=4,dec-enc=6",
    )
    group.add_argument(
        "--head_selection",
        default="learned",
        metavar="HOW",
        help="learned while training; importance: by gradient, before training; random (learned)",
    )
    group.add_argument(
        "--gate_weight",
        type=not_negative,
        metavar="X",
        help="lambda per head: learn gates, count open (Voita et al.'s concrete_coef over the number of gated modules)",
    )
    group.add_argument(
        "--alive_heads", type=path, metavar="FILE", help="JSON: role -> a list of 0 and 1 per layer, or by path"
    )
    group.add_argument("--gated_sites", nargs="+", metavar="SITE", help="roles or paths that lose heads; all")
    group.add_argument(
        "--gate_learning_rate", type=positive, default=0.1, metavar="LR", help="peak, of the gates (0.1)"
    )
    group.add_argument(
        "--selection_share",
        type=positive,
        default=0.1,
        metavar="X",
        help="of the steps, in which the number falls (0.1)",
    )
    group.add_argument(
        "--importance_samples", type=count, default=256, metavar="N", help="examples to rank heads on first (256)"
    )


def wants_gates(args: Namespace) -> bool:
    """Whether the run gates or removes heads."""
    return any(getattr(args, flag) is not None for flag in FLAGS)


def learns_gates(args: Namespace) -> bool:
    """Whether gates are trained (else the heads are chosen and removed before training)."""
    return args.gate_weight is not None or (args.target_heads is not None and args.head_selection == "learned")


def check_heads(args: Namespace) -> None:
    """Check what a single flag cannot know.

    Raises:
        ArgumentError: naming the flag and the way out.
    """
    check_choice("--head_selection", args.head_selection, SELECTIONS)
    given = [f"--{flag}" for flag in FLAGS if getattr(args, flag) is not None]
    if len(given) > 1:
        raise ArgumentError(f"{' and '.join(given)} exclude each other: one of them says which heads stay")
    if args.head_selection != "learned" and args.target_heads is None:
        raise ArgumentError(f"--head_selection {args.head_selection} needs --target_heads")
    if args.gated_sites and (not given or args.alive_heads or isinstance(args.target_heads, Mapping)):
        raise ArgumentError(
            "--gated_sites goes with --gate_weight or a total for --target_heads; the others name their own"
        )
    if args.head_selection == "importance" and not args.importance_samples:
        raise ArgumentError("--head_selection importance needs --importance_samples")
    if args.selection_share > 1:
        raise ArgumentError(f"--selection_share {args.selection_share} is a share, 1 at most")
    if learns_gates(args) and not trains(args):
        flag = "num_train_epochs" if args.max_train_steps is None else "max_train_steps"
        raise ArgumentError(f"gates are learned in training: --{flag} is 0 (or use --head_selection importance)")
    if given and args.collaborative and args.swap == "after" and isinstance(args.dim_shared_query_key, int):
        raise ArgumentError(
            f"--dim_shared_query_key {args.dim_shared_query_key} with --swap after is the width of heads that may be "
            "gone by then: give a share, such as 0.5, or swap before or between"
        )


def check_model(args: Namespace, model: PreTrainedModel) -> None:
    """Check early, before anything is written, that the model has the sites and heads that the flags name.

    Raises:
        CollabHeadsError: if it has not, or has gates already.
    """
    if not wants_gates(args):
        return
    adapter = get_adapter(model)
    if gated_sites(model, adapter):
        raise ArgumentError(f"{args.model_name_or_path} has gates already: prune_heads or fold_heads them first")
    if args.alive_heads:
        alive_choice(adapter.sites_with_heads(model), read_alive(args.alive_heads))
    elif args.target_heads is not None:
        check_target(args.target_heads, roles_of_heads(chosen_sites(args, model)))
    else:
        chosen_sites(args, model)


def chosen_sites(args: Namespace, model: PreTrainedModel) -> list[AttentionSite]:
    """The sites whose heads may go."""
    names = list(args.target_heads) if isinstance(args.target_heads, Mapping) else args.gated_sites
    return select_sites(get_adapter(model).sites_with_heads(model), names)


def read_alive(path: str) -> dict:
    """Read a configuration of heads.

    Raises:
        DataError: if the file cannot be read as JSON.
    """
    try:
        return parse_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"--alive_heads {path}: {error}") from error


def start(
    accelerator: Accelerator, args: Namespace, model: PreTrainedModel, samples: Callable[[int], Sequence[Mapping]]
) -> PruneReport | None:
    """Gate the model, or choose heads and remove them at once.

    Args:
        accelerator: the first process chooses for all.
        args: the flags.
        model: the model.
        samples: a number of examples -> labelled batches, for importance.

    Returns:
        What was removed; None if the gates are still to be learned.
    """
    sites = [site.path for site in chosen_sites(args, model)] if args.alive_heads is None else None
    if learns_gates(args):
        swap_to_gated(model, sites=sites)
        return None
    alive = agreed(accelerator, lambda: choose_alive(args, model, sites, samples))
    swap_to_gated(model, alive_heads=alive)
    return prune_heads(model)


def ranking(
    accelerator: Accelerator, args: Namespace, model: PreTrainedModel, samples: Callable[[int], Sequence[Mapping]]
) -> Mapping | None:
    """The importance that learning an exact number of heads starts from; the arguments of `start`."""
    if args.target_heads is None or not args.importance_samples:
        return None
    return agreed(accelerator, lambda: head_importance(model, samples(args.importance_samples)))


def choose_alive(args, model, sites, samples) -> Mapping:
    """The configuration that the flags ask for."""
    if args.alive_heads is not None:
        return read_alive(args.alive_heads)
    if args.head_selection == "importance":
        scores = head_importance(model, samples(args.importance_samples))
    else:
        generator = torch.Generator().manual_seed(args.seed)
        scores = {
            site.path: torch.rand(site.num_heads, generator=generator)
            for site in get_adapter(model).sites_with_heads(model)
        }
    return most_important(model, {path: scores[path] for path in sites}, args.target_heads)


def penalty_options(args: Namespace, total: int, scores: Mapping | None) -> dict[str, object]:
    """What a `HeadPenalty` of a training of `total` optimizer steps is told; `scores` from `ranking`, or None."""
    if args.gate_weight is not None:
        return {"gate_weight": args.gate_weight}
    steps = max(1, math.ceil(args.selection_share * total))
    return {"target_heads": args.target_heads, "steps": steps, "scores": scores, "seed": args.seed}


def finish(model: PreTrainedModel) -> tuple[dict, PruneReport]:
    """Remove the heads that training closed: what the gates say, and what was removed."""
    return gate_report(model).to_dict(), prune_heads(model)
