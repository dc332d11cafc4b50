"""The flags of head rotation."""

import argparse
from argparse import Namespace

from collab_heads.base.checks import check_choice
from collab_heads.base.option_values import METRIC_WORDS, POLICY_WORDS
from collab_heads.command.flags.arguments import trains
from collab_heads.command.flags.heads import learns_gates
from collab_heads.command.flags.parsing import count, path, per_role
from collab_heads.command.flags.signatures import options_of
from collab_heads.errors import ArgumentError

OF_ROTATE = ("metric", "count", "frequency", "rest", "start", "end", "layer_pairs", "sites")


def add_rotation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for heads that change places in training."""
    group = parser.add_argument_group("rotating heads")
    add = group.add_argument
    add(
        "--rotation_schedule",
        type=path,
        metavar="FILE",
        help="JSON file: epoch -> pairs of heads that change places before it",
    )
    add(
        "--rotate",
        type=per_role(str.strip, what="policy"),
        metavar="POLICY",
        help="instead, let a policy choose the pairs again and again: hard, soft, local or random; one, or one per "
        "role, such as enc-self=soft,dec-enc=hard",
    )
    add(
        "--rotation_metric",
        type=per_role(str.strip, what="name"),
        metavar="NAME",
        help="what the policy ranks heads by: confidence; output_distance (l2), of their outputs; map_distance "
        "(pairwise), of their attention maps; base; wasserstein; one, or one per role (default: confidence)",
    )
    numbers = {
        "count": "pairs of heads that change places",
        "frequency": "epochs until they change back",
        "rest": "epochs from there to the next exchange",
        "start": "epoch of the first exchange, counted from 1",
        "end": "last epoch in which heads may be exchanged",
        "layer_pairs": "pairs of layers between which soft exchanges heads, the outermost first",
    }
    nothing = {"end": "the last", "layer_pairs": "all"}  # what None means
    for name, text in numbers.items():
        default = nothing.get(name) or options_of("rotation.dynamic", "DynamicRotation")[name].default
        per = f"{text}; one number, or one per role, such as enc-self=2 (default: {default})"
        add(f"--rotation_{name}", type=per_role(count), metavar="N", help=per)
    add(
        "--rotation_sites",
        nargs="+",
        metavar="ROLE",
        help="roles whose heads change places: enc-self, dec-self, dec-enc (default: all)",
    )


def check_rotation(args: Namespace) -> None:
    """Check the flags of head rotation against each other and the other flags.

    Raises:
        ArgumentError: if flags are wrong or contradict each other; the message names the flag and the way out.
    """
    given = [f"--rotation_{name}" for name in OF_ROTATE if getattr(args, f"rotation_{name}") is not None]
    if given and not args.rotate:
        raise ArgumentError(f"{', '.join(given)} need --rotate")
    if args.rotate and args.rotation_schedule:
        raise ArgumentError("--rotate and --rotation_schedule exclude each other: one of them says what swaps")
    if args.rotate:
        for policy in each_value(args.rotate):
            check_choice("--rotate", policy, POLICY_WORDS)
        for metric in each_value(args.rotation_metric or "confidence"):
            check_choice("--rotation_metric", metric, METRIC_WORDS)
    if wants_rotation(args) and not trains(args):
        raise ArgumentError("heads rotate in training: there are no training steps")
    if wants_rotation(args) and args.collaborative:
        raise ArgumentError("--collaborative heads share one projection: they cannot rotate")
    if wants_rotation(args) and args.compress_budget is not None:
        raise ArgumentError("--compress_budget gives heads of other layers other widths: they cannot rotate")
    if wants_rotation(args) and getattr(args, "average_checkpoints", None):
        raise ArgumentError("--average_checkpoints would average heads that changed places between checkpoints")
    everywhere = args.alpha_sites is None and args.gated_sites is None and not isinstance(args.target_heads, dict)
    if wants_rotation(args) and args.alpha_mixing and learns_gates(args) and everywhere:
        raise ArgumentError(
            "heads with gates and alphas cannot rotate, gates would leave and alphas stay: leave one of the three out, "
            "choose heads by --head_selection gradient, or gate and mix other sites (--gated_sites, --alpha_sites)"
        )


def each_value(given: str | dict[str, str]) -> list[str]:
    """Return the values of a flag that has one value, or one per role."""
    return list(given.values()) if isinstance(given, dict) else [given]


def wants_rotation(args: Namespace) -> bool:
    return bool(args.rotate or args.rotation_schedule)
