"""The checks of flags that all trainings share."""

from argparse import Namespace

from collab_heads.command.flags import analyzing, arguments, heads, rotating


def check_flags(args: Namespace) -> None:
    """Check the flags of a training against each other, before long imports.

    Raises:
        CollabHeadsError: if flags are wrong or contradict each other; the message names the flag and the way out.
    """
    arguments.check_together(args)
    heads.check_heads(args)
    heads.check_alpha_flags(args)
    rotating.check_rotation(args)
    analyzing.check_analysis(args)
