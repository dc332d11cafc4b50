"""The flags of a model from scratch, whatever kind of model it is, and what they ask of each other."""

import argparse
from collections.abc import Collection, Mapping

from collab_heads.errors import ArgumentError
from collab_heads.state import MIXING_INITS
from collab_heads.training.flags.parsing import count_from_1, not_negative, path


def add_sizes(
    parser: argparse.ArgumentParser, example: str, sizes: Mapping[str, str], defaults: Mapping[str, float]
) -> argparse._ArgumentGroup:
    """The flags of a model from scratch.

    Args:
        parser: takes them.
        example: types of models.
        sizes: name of a whole number -> what it is.
        defaults: of those, and of the dropout.

    Returns:
        Their group, for more of them.
    """
    group = parser.add_argument_group("a model from scratch, instead of --model_name_or_path")
    add = group.add_argument
    add("--config_name", type=path, metavar="NAME", help="folder, or name on the Hub, of a configuration")
    add("--model_type", metavar="TYPE", help=f"or a type, such as {example}, with the sizes below")
    for name, text in sizes.items():
        add(f"--{name}", type=count_from_1, metavar="N", help=f"{text} (default: {defaults[name]})")
    add(
        "--dropout",
        type=not_negative,
        metavar="X",
        help=f"share of the activations that is dropped in training (default: {defaults['dropout']})",
    )
    add(
        "--mixing_init",
        default=MIXING_INITS[0],
        metavar="HOW",
        help=f"with --collaborative, how mixing begins: {', '.join(MIXING_INITS)}",
    )
    return group


def from_scratch(args: argparse.Namespace) -> bool:
    """Whether the model starts from scratch."""
    return args.model_name_or_path is None and bool(args.config_name or args.model_type)


def check_sizes_fit(args: argparse.Namespace, names: Collection[str]) -> None:
    """Check that a model is either trained, or from a config, or of a type with sizes.

    Args:
        args: the flags.
        names: of those that give a size.

    Raises:
        ArgumentError: naming the flag and the way out.
    """
    given = [f"--{name}" for name in ("config_name", "model_type", *names) if getattr(args, name) is not None]
    if args.model_name_or_path is not None and given:
        raise ArgumentError(f"{', '.join(given)} describe a model from scratch: leave them or --model_name_or_path out")
    sizes = [flag for flag in given if flag not in ("--config_name", "--model_type")]
    if sizes and args.model_type is None:
        raise ArgumentError(f"{', '.join(sizes)} need --model_type")
    if args.config_name and args.model_type:
        raise ArgumentError("--config_name and --model_type exclude each other")


def check_born(args: argparse.Namespace) -> None:
    """Check what a model that begins from scratch, or collaborative, cannot be asked for.

    Raises:
        ArgumentError: naming the flag and the way out.
    """
    if args.mixing_init != "concatenate" and not (from_scratch(args) and args.collaborative):
        raise ArgumentError("--mixing_init has no effect without --collaborative and a model from scratch")
    if args.dropout is not None and args.dropout >= 1:
        raise ArgumentError(f"--dropout {args.dropout} must be below 1: it is a share of the activations")
    if from_scratch(args) and args.allocation != "uniform":
        raise ArgumentError(f"--allocation {args.allocation} has no meaning from scratch: there is nothing to weigh")
    if from_scratch(args) and args.compress_budget is not None and args.swap == "before":
        raise ArgumentError(
            "--compress_budget has nothing to go by before a model from scratch is trained: --swap after"
        )
    if from_scratch(args) and args.collaborative and args.distill_steps is not None:
        raise ArgumentError("--distill_steps has no original to learn from: the model is collaborative from the start")
    if from_scratch(args) and args.collaborative and args.swap != "before":
        raise ArgumentError("--swap has no meaning from scratch: the model is collaborative from the start")
