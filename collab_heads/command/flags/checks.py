"""The checks that every script makes of its flags."""

from argparse import Namespace

from collab_heads.command.flags import analyzing, arguments, heads, rotating


def check_flags(args: Namespace) -> None:
    """Check what a single flag of a training cannot know, before anything that takes long is imported.

    Raises:
        CollabHeadsError: naming the flag and the way out.
    """
    arguments.check_together(args)
    heads.check_heads(args)
    heads.check_alpha_flags(args)
    rotating.check_rotation(args)
    analyzing.check_analysis(args)
