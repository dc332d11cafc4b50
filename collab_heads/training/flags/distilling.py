"""The flags of the distillation after a swap or a compression."""

import argparse

from collab_heads.errors import ArgumentError
from collab_heads.training.flags.collaborative import wants_swap
from collab_heads.training.flags.parsing import count_from_1, path


def add_distill_arguments(parser: argparse.ArgumentParser) -> None:
    """How a changed model learns from its original."""
    add = parser.add_argument_group("distillation").add_argument
    add(
        "--distill_steps",
        type=count_from_1,
        metavar="N",
        help="after --collaborative or --compress_budget, before any other training: steps in which the changed "
        "attention learns to do what the original does, on 32 training examples each, without labels (default: none)",
    )
    add(
        "--distill_from",
        type=path,
        metavar="NAME",
        help="folder, or name on the Hub, of the original to learn from (default: the model before the change)",
    )


def check_distillation(args: argparse.Namespace) -> None:
    """Check what a single flag cannot know.

    Raises:
        ArgumentError: naming the flag and the way out.
    """
    if args.distill_steps is None:
        if args.distill_from is not None:
            raise ArgumentError("--distill_from needs --distill_steps")
        return
    if not wants_swap(args):
        raise ArgumentError("--distill_steps needs --collaborative or --compress_budget: else there is nothing to mend")
    if args.score_terms != "both":
        raise ArgumentError("--distill_steps would learn what --score_terms leaves out: leave one of them out")
