r"""Show the heads of a model.

    collab-heads analyze sentence-transformers/all-MiniLM-L6-v2 --data text.txt --treebank dev.conllu
    collab-heads analyze Helsinki-NLP/opus-mt-de-en --data dev.de.gz dev.en.gz --output_dir report

Text files have a sentence a line; gzipped where the name ends in .gz. A translation model takes two, or one and its own
translations. Labelled examples: `collab-heads glue --analyze`. Without matplotlib the page has
no curves and distributions, and there are no pictures beside it.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from collab_heads.base.checks import check_choice
from collab_heads.base.option_values import PREFIX_KINDS, REPORT_PARTS
from collab_heads.command.flags.parsing import count_from_1
from collab_heads.command.flags.shared import (
    add_data_arguments,
    add_model_argument,
    add_output_argument,
    add_running_arguments,
    check_files,
    check_input,
    check_model_name,
    check_output_dir,
)
from collab_heads.command.flags.signatures import option_adder
from collab_heads.errors import ArgumentError


def add_arguments(parser: ArgumentParser) -> None:
    add_model_argument(parser)
    add_data_arguments(parser)
    add = parser.add_argument
    add(
        "--treebank",
        metavar="FILE",
        help="CoNLL-U file in the input's language: the report also shows which heads follow its dependencies",
    )
    add_output_argument(parser, "the report", default="head_report")
    add_option = option_adder(add, "analysis.analyze", "analyze_heads")
    add_option(
        "parts",
        metavar="PART",
        help=f"parts of the report, some of {', '.join(REPORT_PARTS)} (default: all but {REPORT_PARTS[-1]})",
    )
    add_option(
        "prefixes",
        metavar="KIND",
        help="what the decoder of a translation model has read when contributions are measured: reference, the second "
        "text; own, what the model makes of the first; random, the translations of others (default: reference)",
    )
    add_option(
        "compare_with",
        metavar="MODEL",
        help="other models, or checkpoints of a training in order, to measure the contributions of beside this one's",
    )
    add("--samples", type=count_from_1, metavar="N", help="use only the first N sentences (default: all)")
    add_option(
        "num_examples", flag="examples", metavar="N", help="sentences, of typical lengths, whose attention is shown"
    )
    add("--all_heads", action="store_true", help="print a row per head, below the summary")
    add_running_arguments(parser)


def check(args: Namespace) -> None:
    """Check the flags, the files and the output folder.

    Raises:
        ArgumentError: if a part, a kind of prefixes or a model does not exist.
        DataError: if a file is missing.
        OutputError: if the folder is not free.
    """
    for part in args.parts or ():
        check_choice("part", part, REPORT_PARTS)
    for kind in args.prefixes or ():
        check_choice("--prefixes", kind, PREFIX_KINDS)
    for model in args.compare_with or ():
        check_model_name(model)
    if args.parts and "contributions" not in args.parts:
        for flag in ("prefixes", "compare_with"):
            if getattr(args, flag):
                raise ArgumentError(f"--{flag} is of contributions, which --parts does not name: add contributions")
    check_output_dir(Path(args.output_dir))
    check_files(args.treebank)
    check_input(args)
