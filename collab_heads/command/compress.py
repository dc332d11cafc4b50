r"""The command that makes the attention of a model smaller: from text alone, without labels.

    python -m collab_heads compress sentence-transformers/all-MiniLM-L6-v2 --data text.txt --plan
    python -m collab_heads compress Helsinki-NLP/opus-mt-de-en --data dev.de dev.en --budget 0.5 --output_dir small
    python -m collab_heads compress MODEL --data reviews.csv --column text --quality 0.1 --output_dir small

`--plan` shows what every budget would cost in quality; `--distill_steps 300` brings back much of it. Text files have a
sentence a line; gzipped where the name ends in .gz. A translation model takes two, or one and its own translations. The
smaller model loads with `from_pretrained` as any model does, where collab_heads has been imported.
"""

import copy
import random
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

from torch import nn

from collab_heads.analysis.treebank.treebank import longest_input
from collab_heads.checks import check_choice
from collab_heads.collaborative.kinds import check_kind
from collab_heads.command.batches import batches_of, fitting
from collab_heads.command.compressed import check_class, write_model, write_plan
from collab_heads.command.flags import add_data_arguments, add_running_arguments, check_output_dir
from collab_heads.command.models import load
from collab_heads.command.texts import read_data
from collab_heads.compression.choices import PARTS
from collab_heads.compression.compress import compress
from collab_heads.compression.compression_plan import CompressionPlan, check_budget
from collab_heads.compression.held_out import EVERY
from collab_heads.compression.measures import MEASURES
from collab_heads.compression.plan import plan
from collab_heads.compression.report import CompressReport
from collab_heads.distillation.distill import distill
from collab_heads.distillation.examples import num_examples
from collab_heads.errors import ArgumentError, DataError
from collab_heads.extras import check_extra
from collab_heads.folders import write_folder
from collab_heads.training.data.parallel import Pairs
from collab_heads.training.flags.parsing import Parser, count, count_from_1, path, positive, seed


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Read the flags."""
    parser = Parser(prog="python -m collab_heads compress", description=__doc__)
    add_data_arguments(parser)
    add = parser.add_argument
    add("--output_dir", type=path, metavar="DIR", help="folder for the smaller model; must be new or empty")
    add("--plan", action="store_true", help="only show what every budget would cost; the model stays as it is")
    add(
        "--budget",
        type=positive,
        metavar="SHARE",
        help="what is to be left of attention, such as 0.5 (default, unless there is a --quality)",
    )
    add(
        "--quality",
        type=positive,
        metavar="ERROR",
        help="instead of a budget: by how much the output may change, such as 0.1; the model becomes as small as that "
        "allows",
    )
    add("--of", default=MEASURES[0], metavar="WHAT", help=f"what the budget is of: {', '.join(MEASURES)}")
    add(
        "--mixing",
        default="per_head",
        metavar="KIND",
        help="per_head: every head has its own, narrower query and key; shared: all heads use one, which is smallest, "
        "and slow",
    )
    add(
        "--sites",
        nargs="+",
        metavar="SITE",
        help="the attention that may change, by role (enc-self, dec-self, dec-enc) or module path (default: all)",
    )
    add(
        "--parts",
        nargs="+",
        default=list(PARTS),
        metavar="PART",
        help=f"what may become smaller, some of {', '.join(PARTS)} (default: all)",
    )
    add("--samples", type=count_from_1, default=512, metavar="N", help="sentences to fit to, drawn by the seed")
    add("--refine_steps", type=count, default=120, metavar="N", help="gradient steps per layer that improve the fit")
    add(
        "--distill_steps",
        type=count,
        default=0,
        metavar="N",
        help="training steps in which the smaller model learns to be like the original, on all of --data and without "
        "labels; 300 bring back much of what was lost",
    )
    add("--seed", type=seed, default=0, metavar="N", help="seed of everything that is random")
    add_running_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> CompressReport | CompressionPlan:
    """Compress, print and write; returns the report. All input is read and checked before the model runs."""
    args = parse(argv)
    check_flags(args)
    all_texts = read_data(args)
    model, tokenizer, dtype = load(args)
    check_class(model)
    args.max_length = min(args.max_length, longest_input(model, tokenizer) or args.max_length)
    texts = fitting(args, model, tokenizer, drawn(all_texts, args.samples, args.seed))
    check_enough(args, texts)
    batches = batches_of(args, model, tokenizer, texts)
    how = {"parts": args.parts, "mixing": args.mixing, "refine_steps": args.refine_steps, "seed": args.seed}
    made = plan(model, batches, of=args.of, sites=args.sites, **how)
    print(made)
    if args.plan:
        if args.output_dir is not None:
            write_folder(Path(args.output_dir), partial(write_plan, made))
            print(f"plan: {args.output_dir}")
        return made
    original = copy.deepcopy(model) if args.distill_steps else None
    report = compress(model, made, args.budget, quality=args.quality)
    print(report)
    distilled = None
    if original is not None:
        several = drawn(all_texts, num_examples(args.distill_steps, args.batch_size), args.seed)
        batches = batches_of(args, original, tokenizer, fitting(args, original, tokenizer, several))
        distilled = distill(model, original, batches, args.distill_steps, seed=args.seed)
        print(distilled)
    cast(nn.Module, model).to(dtype)
    fill = partial(write_model, Path(args.model), model, tokenizer, made, report, distilled)
    write_folder(Path(args.output_dir), fill, sum(parameter.nbytes for parameter in model.parameters()))
    print(f"model: {args.output_dir}")
    return report


def check_flags(args: Namespace) -> None:
    """Check what a single flag cannot know, and the output folder.

    Raises:
        ArgumentError: naming the flag and the way out.
        OutputError: if the folder is not free.
    """
    check_choice("--of", args.of, MEASURES)
    check_kind(args.mixing)
    for part in args.parts:
        check_choice("--parts", part, PARTS)
    if args.budget is not None and args.quality is not None:
        raise ArgumentError("--budget and --quality exclude each other: give one")
    if args.plan and (args.budget, args.quality) != (None, None):
        raise ArgumentError("--plan shows every budget: leave --budget and --quality out, or leave --plan out")
    if args.plan and args.distill_steps:
        raise ArgumentError("--plan makes no model that --distill_steps could train: leave one out")
    if args.distill_steps:
        check_extra("train", "distillations", ("accelerate",))
    if args.budget is not None:
        check_budget(args.budget)
    if args.output_dir is not None:
        check_output_dir(Path(args.output_dir))
    elif not args.plan:
        raise ArgumentError("--output_dir is missing: a new folder for the smaller model (or only look, with --plan)")


def drawn(texts: Pairs, most: int, seed: int) -> Pairs:
    """So many of the sentences, drawn by a seed, in their order."""
    size = len(texts["source"])
    chosen = sorted(random.Random(seed).sample(range(size), min(most, size)))
    return {side: [lines[i] for i in chosen] for side, lines in texts.items()}


def check_enough(args: Namespace, texts: Pairs) -> None:
    """Raise DataError unless there are sentences to fit to, and one to measure on."""
    if (found := len(texts["source"])) < EVERY:
        raise DataError(
            f"{' and '.join(args.data)}: {found} sentences, and one of {EVERY} is kept to measure on: give more "
            "(128 to 512 are good)"
        )
