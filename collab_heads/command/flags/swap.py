r"""Replace queries and keys by narrower or shared ones, and values by narrower ones, of widths that you give.

    collab-heads swap sentence-transformers/all-MiniLM-L6-v2 --dim_shared_query_key 0.5 --data text.txt --output_dir out
    collab-heads swap Helsinki-NLP/opus-mt-de-en --dim_shared_query_key enc-self=256,dec-enc=128 --output_dir out

With texts the replacement is fitted to what the layers see, which keeps far more of the quality than the weights alone
do. `collab-heads compress` finds the widths itself.
"""

from argparse import ArgumentParser, Namespace

from collab_heads.base.checks import check_choice
from collab_heads.base.option_values import ALLOCATIONS
from collab_heads.command.flags.collaborative import SWAP, add_fit_arguments, add_width_arguments
from collab_heads.command.flags.shared import (
    add_data_arguments,
    add_model_argument,
    add_output_argument,
    add_running_arguments,
    add_sample_arguments,
    check_input,
    check_new_model,
)
from collab_heads.command.flags.signatures import option_adder
from collab_heads.errors import ArgumentError


def add_arguments(parser: ArgumentParser) -> None:
    add_model_argument(parser)
    add_width_arguments(parser.add_argument)
    option_adder(parser.add_argument, *SWAP)(
        "sites",
        metavar="SITE",
        help="the attention to replace, by role (enc-self, dec-self, dec-enc) or module path (default: all)",
    )
    add_data_arguments(parser, required=False, why="what the replacement is fitted to: ")
    add_output_argument(parser)
    add_fit_arguments(parser.add_argument)
    add_sample_arguments(parser)
    add_running_arguments(parser)


def check(args: Namespace) -> None:
    """Check the flags against each other, the files and the output folder.

    Raises:
        ArgumentError: if flags are wrong or contradict each other; the message names the flag and the way out.
        DataError: if a file is missing.
        OutputError: if the folder is not free.
    """
    check_choice("--allocation", args.allocation, ALLOCATIONS)
    if args.allocation == "balanced" and args.data is None:
        raise ArgumentError("--allocation balanced needs --data")
    check_new_model(args)
    check_input(args)
