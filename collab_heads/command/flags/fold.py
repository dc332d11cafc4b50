r"""Make a stock model again, which loads without this package: gates and alphas go into the output projections.

    collab-heads fold trained --output_dir out

Fewer heads, and narrower queries, keys and values, stay so where the configuration of the family can say it; other
removed heads come back as zeros. What no stock model can be is refused, and said why.
"""

from argparse import ArgumentParser, Namespace

from collab_heads.command.flags.shared import (
    add_loading_arguments,
    add_model_argument,
    add_output_argument,
    check_input,
    check_new_model,
)


def add_arguments(parser: ArgumentParser) -> None:
    add_model_argument(parser)
    add_output_argument(parser)
    add_loading_arguments(parser)


def check(args: Namespace) -> None:
    """Check the model and the output folder.

    Raises:
        ArgumentError: if there is no such model, or the output folder is not given.
        OutputError: if the folder is not free.
    """
    check_new_model(args)
    check_input(args)
