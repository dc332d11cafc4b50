"""The flags for analyses of the heads: `--analyze`, at the end, and `--analyze_every`, in training."""

import argparse
from argparse import Namespace

from collab_heads.analysis.treebank.conllu import Sentence, read_conllu
from collab_heads.base.checks import check_choice
from collab_heads.base.extras import check_extra
from collab_heads.base.option_values import PREFIX_KINDS, ReportPart
from collab_heads.command.flags.arguments import trains
from collab_heads.command.flags.parsing import count_from_1, interval, path
from collab_heads.errors import ArgumentError

ABLATION: tuple[ReportPart, ...] = ("statistics", "roles", "relevance", "gradient", "reconstruction", "ablation")

LOSS = "loss"  # measured without each head unless another metric is named


def add_analysis_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for analyses of the heads."""
    group = parser.add_argument_group("looking at heads")
    add = group.add_argument
    add(
        "--analyze",
        action="store_true",
        help="at the end, write a report on the heads, tables and pictures, to head_report/",
    )
    add(
        "--analyze_samples",
        type=count_from_1,
        metavar="N",
        help="validation examples that heads are looked at on (default: all)",
    )
    add(
        "--analyze_every",
        type=interval,
        metavar="N|epoch",
        help="every N optimizer steps, or after every epoch, note how sure heads are, how open their gates, and how "
        "they are mixed; at the end draw it, still and moving, in head_history/",
    )
    add(
        "--analyze_treebank",
        type=path,
        metavar="FILE",
        help="CoNLL-U file in the input's language: the report also shows which heads follow its dependencies",
    )
    add(
        "--analyze_ablation",
        nargs="?",
        const=LOSS,
        default=False,
        metavar="METRIC",
        help="also measure the model without each head, one evaluation per head: its loss, or another metric, "
        "such as bleu",
    )


def add_prefix_argument(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the decoder prefixes of contributions, which only translation models have."""
    parser.add_argument(
        "--analyze_prefixes",
        nargs="+",
        metavar="KIND",
        help="for --analyze: what the decoder has read when contributions of source and target are measured, some of "
        "reference, own (the model's translations) and random (those of other sentences) (default: reference)",
    )


def check_analysis(args: Namespace) -> None:
    """Make all checks of these flags that need neither model nor data; a treebank is read once.

    Raises:
        ArgumentError: if a flag has no effect.
        DataError: if the treebank is missing or broken.
        MissingPackageError: if matplotlib is missing, or Pillow, which moving pictures need.
    """
    for flag in ("analyze_treebank", "analyze_ablation", "analyze_prefixes"):
        if getattr(args, flag, None) and not args.analyze:
            raise ArgumentError(f"--{flag} has no effect without --analyze")
    for kind in getattr(args, "analyze_prefixes", None) or ():
        check_choice("--analyze_prefixes", kind, PREFIX_KINDS)
    if args.analyze_samples and not (args.analyze or args.analyze_every):
        raise ArgumentError("--analyze_samples has no effect without --analyze or --analyze_every")
    for flag in ("analyze", "analyze_every"):
        if getattr(args, flag):
            if args.output_dir is None:
                raise ArgumentError(f"--{flag} needs --output_dir")
            check_extra("plots", "pictures")
    if args.analyze_every:
        check_extra("train", "pictures that move", ["pillow"])
        if not trains(args):
            raise ArgumentError("--analyze_every looks at heads in training: there are no training steps")
    treebank(args)


def treebank(args: Namespace) -> list[Sentence] | None:
    """Read the sentences of the treebank; None if no treebank is given."""
    return read_conllu(args.analyze_treebank) if args.analyze_treebank else None
