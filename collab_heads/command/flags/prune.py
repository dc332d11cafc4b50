r"""Remove heads: fewer parameters, less work, a smaller cache.

    collab-heads prune sentence-transformers/all-MiniLM-L6-v2 --target_heads 36 --data text.txt --output_dir out
    collab-heads prune Helsinki-NLP/opus-mt-de-en --target_heads dec-enc=24 --data dev.de dev.en --output_dir out
    collab-heads prune trained --output_dir out

The last line is for a model with gates: what is closed goes. `--target_heads` says how many heads stay; which ones,
`--head_selection`: reconstruction keeps those that the others can least stand in for, and needs no labels.
"""

from argparse import ArgumentParser, Namespace

from collab_heads.base.checks import check_choice
from collab_heads.base.option_values import CRITERION_WORDS
from collab_heads.command.flags.parsing import count, path, per_role
from collab_heads.command.flags.shared import (
    add_data_arguments,
    add_model_argument,
    add_output_argument,
    add_running_arguments,
    add_sample_arguments,
    check_files,
    check_input,
    check_new_model,
)
from collab_heads.command.flags.signatures import option_adder
from collab_heads.errors import ArgumentError


def add_arguments(parser: ArgumentParser) -> None:
    add_model_argument(parser)
    add = parser.add_argument
    add(
        "--target_heads",
        type=per_role(count),
        metavar="N",
        help="keep this many heads: N in the whole model, or per role, such as enc-self=4,dec-self=4,dec-enc=6",
    )
    option_adder(add, "heads.prune", "prune_heads")(
        "criterion",
        flag="head_selection",
        metavar="HOW",
        help="which heads stay: reconstruction, those that the others can least stand in for; gradient, by the "
        "gradient of the loss (translation models and language models); random",
    )
    add(
        "--alive_heads",
        type=path,
        metavar="FILE",
        help="instead, a JSON file that names the heads to keep: role -> for every layer a list of 0 and 1, or "
        "module path -> such a list",
    )
    add(
        "--sites",
        nargs="+",
        metavar="SITE",
        help="where heads may be removed: roles (enc-self, dec-self, dec-enc) or module paths (default: everywhere)",
    )
    add("--no_repair", action="store_true", help="do not fit the output projections so that the other heads make up")
    add_data_arguments(parser, required=False, why="what heads are measured on, and the others fitted to: ")
    add_output_argument(parser)
    add_sample_arguments(parser)
    add_running_arguments(parser)


def check(args: Namespace) -> None:
    """Check the flags against each other, the files and the output folder.

    Raises:
        ArgumentError: if flags are wrong or contradict each other; the message names the flag and the way out.
        DataError: if a file is missing.
        OutputError: if the folder is not free.
    """
    check_choice("--head_selection", args.head_selection, CRITERION_WORDS)
    if args.target_heads is not None and args.alive_heads is not None:
        raise ArgumentError("--target_heads and --alive_heads exclude each other: one of them says which heads stay")
    if args.target_heads is not None and args.head_selection != "random" and args.data is None:
        raise ArgumentError(f"--head_selection {args.head_selection} needs --data (or choose at random)")
    if args.sites and not isinstance(args.target_heads, int):
        raise ArgumentError("--sites goes with a total for --target_heads; the others name their own")
    check_new_model(args)
    check_files(args.alive_heads)
    check_input(args)
