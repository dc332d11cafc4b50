r"""Say what is in a model: its attention, module by module, with heads, widths, parameters and cache.

    collab-heads inspect small
    collab-heads inspect bert
    collab-heads inspect

A folder or a name on the Hub is one model, whose weights are not loaded; the type of a model, such as bert, says what
works with its family; nothing says it of all.
"""

from argparse import ArgumentParser, Namespace

from collab_heads.command.flags.shared import add_loading_arguments, check_input


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder, or name on the Hub, of a model; or the type of a model"
    )
    add_loading_arguments(parser)


def check(args: Namespace) -> None:
    """Raise ArgumentError if MODEL is a path that does not exist, or a folder without a model."""
    if args.model is not None:
        check_input(args)
