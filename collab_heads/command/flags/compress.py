r"""Make the layers of a model smaller: from text alone, without labels.

    collab-heads compress sentence-transformers/all-MiniLM-L6-v2 --data text.txt --plan
    collab-heads compress Helsinki-NLP/opus-mt-de-en --data dev.de dev.en --budget 0.5 --output_dir small
    collab-heads compress MODEL --data reviews.csv --column text --max_error 0.1 --output_dir small

`--plan` shows what every budget would cost in quality; `--distill_steps 300` brings back much of it. Text files have a
sentence a line; gzipped where the name ends in .gz. A translation model takes two, or one and its own translations. The
smaller model loads with `from_pretrained` as any model does, where collab_heads has been imported.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from collab_heads.base.checks import check_choice
from collab_heads.base.extras import check_extra
from collab_heads.base.option_values import MEASURES, MODEL_SHAPES, SITE_PARTS
from collab_heads.command.flags.parsing import count
from collab_heads.command.flags.shared import (
    add_data_arguments,
    add_model_argument,
    add_output_argument,
    add_running_arguments,
    add_sample_arguments,
    check_input,
    check_output_dir,
)
from collab_heads.command.flags.signatures import option_adder
from collab_heads.errors import ArgumentError


def add_arguments(parser: ArgumentParser) -> None:
    add_model_argument(parser)
    add_data_arguments(parser)
    add_output_argument(parser, "the smaller model")
    add = parser.add_argument
    add("--plan", action="store_true", help="only show what every budget would cost; the model stays as it is")
    add_option = option_adder(add, "compression.compress", "compress")
    add_option(
        "budget",
        metavar="SHARE",
        help="what is to be left of the layers, such as 0.5 (default, unless there is a --max_error)",
    )
    add_option(
        "max_error",
        metavar="ERROR",
        help="instead of a budget: by how much the output may change, such as 0.1; the model becomes as small as that "
        "allows",
    )
    add_option("of", metavar="WHAT", help=f"what the budget is of: {', '.join(MEASURES)}")
    add_option(
        "kind",
        metavar="KIND",
        help="per_head: every head has its own, narrower query and key; shared: all heads use one, which is smallest, "
        "and slow",
    )
    add_option(
        "sites",
        metavar="SITE",
        help="the sites that may change, by role (enc-self, dec-self, dec-enc; feed-forward: enc-ffn, dec-ffn) or "
        "module path (default: all)",
    )
    add_option(
        "parts",
        metavar="PART",
        help=f"what may become smaller, some of {', '.join(SITE_PARTS)} (default: all)",
    )
    add_option(
        "shape",
        metavar="SHAPE",
        help="even: all feed-forward blocks of a stack keep the same number of neurons, or none; free: every site has "
        "sizes of its own; ctranslate2: what this engine runs; uniform: what a stock config can say "
        "(default: even for models without a head, else free)",
    )
    add_option(
        "multiple_of",
        metavar="N",
        help="what the widths of smaller layers are multiples of; 64 suits GPUs and four bits",
    )
    add_option("refine_steps", metavar="N", help="gradient steps per layer that improve the fit")
    add(
        "--distill_steps",
        type=count,
        default=0,
        metavar="N",
        help="training steps in which the smaller model learns to be like the original, on all of --data and without "
        "labels; 300 bring back much of what was lost",
    )
    add_sample_arguments(parser)
    add_running_arguments(parser)


def check(args: Namespace) -> None:
    """Check the flags against each other, the files and the output folder.

    Raises:
        ArgumentError: if flags are wrong or contradict each other; the message names the flag and the way out.
        MissingPackageError: if `--distill_steps` needs a package that is not installed.
        DataError: if a file is missing.
        OutputError: if the folder is not free.
    """
    check_choice("--of", args.of, MEASURES)
    if args.shape is not None:
        check_choice("--shape", args.shape, MODEL_SHAPES)
    for part in args.parts or ():
        check_choice("--parts", part, SITE_PARTS)
    if args.budget is not None and args.max_error is not None:
        raise ArgumentError("--budget and --max_error exclude each other: give one")
    if args.budget is not None and args.budget > 1:
        raise ArgumentError(f"budget {args.budget} must be a share of what the layers have now: above 0, at most 1")
    if args.plan and (args.budget, args.max_error) != (None, None):
        raise ArgumentError("--plan shows every budget: leave --budget and --max_error out, or leave --plan out")
    if args.plan and args.distill_steps:
        raise ArgumentError("--plan makes no model that --distill_steps could train: leave one out")
    if args.distill_steps:
        check_extra("train", "distillations", ("accelerate",))
    if not args.plan and args.output_dir is None:
        raise ArgumentError("--output_dir is missing: a new folder for the smaller model (or only look, with --plan)")
    if args.output_dir is not None:
        check_output_dir(Path(args.output_dir))
    check_input(args)
