"""Head rotation as the scripts' flags describe it."""

import argparse
from argparse import Namespace
from collections.abc import Iterable

from transformers import PreTrainedModel

from collab_heads.checks import check_choice
from collab_heads.errors import ArgumentError
from collab_heads.rotation.dynamic import DynamicRotation
from collab_heads.rotation.manual import HeadRotation
from collab_heads.rotation.policies import POLICIES
from collab_heads.rotation.ranking import METRICS
from collab_heads.training.flags.arguments import count, path, per_role, trains
from collab_heads.training.flags.pruning import learns_gates

OF_ROTATE = ("metric", "count", "frequency", "rest", "start", "end", "sites")


def add_rotation_arguments(parser: argparse.ArgumentParser) -> None:
    """Which heads change places while training."""
    group = parser.add_argument_group("rotating heads")
    group.add_argument(
        "--rotation_schedule", type=path, metavar="FILE", help="JSON: epoch -> pairs of heads that change places"
    )
    group.add_argument("--rotate", metavar="POLICY", help=f"{', '.join(POLICIES)}: choose the pairs in every cycle")
    group.add_argument(
        "--rotation_metric",
        metavar="NAME",
        help="to rank heads: confidence; output_distance (l2), of their outputs; map_distance (pairwise), of their "
        "attention maps; base; wasserstein (confidence)",
    )
    group.add_argument("--rotation_count", type=per_role(count), metavar="N", help="pairs; or per role: enc-self=2 (1)")
    group.add_argument(
        "--rotation_frequency", type=per_role(count), metavar="N", help="epochs until they swap back (1)"
    )
    group.add_argument("--rotation_rest", type=per_role(count), metavar="N", help="epochs until the next swap (1)")
    group.add_argument(
        "--rotation_start", type=per_role(count), metavar="N", help="epoch of the first swap, from 1 (1)"
    )
    group.add_argument(
        "--rotation_end", type=per_role(count), metavar="N", help="last epoch with swapped heads (the last)"
    )
    group.add_argument("--rotation_sites", nargs="+", metavar="ROLE", help="roles that rotate; all")


def check_rotation(args: Namespace) -> None:
    """Check what a single flag cannot know.

    Raises:
        ArgumentError: naming the flag and the way out.
    """
    given = [f"--rotation_{name}" for name in OF_ROTATE if getattr(args, f"rotation_{name}") is not None]
    if given and not args.rotate:
        raise ArgumentError(f"{', '.join(given)} need --rotate")
    if args.rotate and args.rotation_schedule:
        raise ArgumentError("--rotate and --rotation_schedule exclude each other: one of them says what swaps")
    if args.rotate:
        check_choice("--rotate", args.rotate, POLICIES)
        check_choice("--rotation_metric", args.rotation_metric or "confidence", METRICS)
    if wants_rotation(args) and not trains(args):
        raise ArgumentError("heads rotate in training: there are no training steps")
    if wants_rotation(args) and args.collaborative:
        raise ArgumentError("--collaborative heads share one projection: they cannot rotate")
    if wants_rotation(args) and getattr(args, "average_checkpoints", None):
        raise ArgumentError("--average_checkpoints would average heads that changed places between checkpoints")
    everywhere = args.alpha_sites is None and args.gated_sites is None and not isinstance(args.target_heads, dict)
    if wants_rotation(args) and args.alpha_mixing and learns_gates(args) and everywhere:
        raise ArgumentError(
            "heads with gates and alphas cannot rotate, gates would leave and alphas stay: leave one of the three out, "
            "choose heads by --head_selection importance, or gate and mix other sites (--gated_sites, --alpha_sites)"
        )


def wants_rotation(args: Namespace) -> bool:
    """Whether heads rotate."""
    return bool(args.rotate or args.rotation_schedule)


def rotation_of(args: Namespace, exclude: Iterable[int] | None = None) -> HeadRotation | DynamicRotation | None:
    """The rotation that the flags describe; `exclude` holds ids of tokens that do not count in rankings.

    Raises:
        CollabHeadsError: if the schedule cannot be read, or a setting cannot be.
    """
    if args.rotation_schedule:
        return HeadRotation.from_json(args.rotation_schedule)
    if not args.rotate:
        return None
    names = {name: "roles" if name == "sites" else name for name in OF_ROTATE}
    values = {own: getattr(args, f"rotation_{name}") for name, own in names.items()}
    return DynamicRotation(
        args.rotate, seed=args.seed, exclude=exclude, **{k: v for k, v in values.items() if v is not None}
    )


def rotating_paths(rotation: HeadRotation | DynamicRotation, model: PreTrainedModel) -> set[str]:
    """The sites whose heads may change places."""
    if isinstance(rotation, HeadRotation):
        return {slot.path for epoch in rotation.schedule for pair in rotation.pairs(model, epoch) for slot in pair}
    return {slot.path for _, stack in rotation.stacks(model).values() for layer in stack for slot in layer}
