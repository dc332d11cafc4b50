r"""The command that shows the heads of a model.

    python -m collab_heads analyze sentence-transformers/all-MiniLM-L6-v2 --data text.txt --treebank dev.conllu
    python -m collab_heads analyze Helsinki-NLP/opus-mt-de-en --data dev.de.gz dev.en.gz --output_dir report

Text files have a sentence a line; gzipped where the name ends in .gz. A translation model takes two, or one and its own
translations. Labelled examples: `run_glue.py --analyze`.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from collab_heads.analysis.analyze import analyze_heads
from collab_heads.analysis.options import PARTS
from collab_heads.analysis.plots import check_matplotlib
from collab_heads.analysis.report.head_report import HeadReport
from collab_heads.analysis.treebank.conllu import read_conllu
from collab_heads.analysis.treebank.treebank import longest_input
from collab_heads.command.batches import batches_of, fitting
from collab_heads.command.flags import add_data_arguments, add_running_arguments, check_output_dir
from collab_heads.command.models import load
from collab_heads.command.texts import read_data
from collab_heads.text import portable_name
from collab_heads.training.flags.parsing import Parser, count, count_from_1, path


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Read the flags."""
    parser = Parser(prog="python -m collab_heads analyze", description=__doc__)
    add_data_arguments(parser)
    add = parser.add_argument
    add(
        "--treebank",
        metavar="FILE",
        help="CoNLL-U file in the input's language: the report also shows which heads follow its dependencies",
    )
    add(
        "--output_dir",
        type=path,
        default="head_report",
        metavar="DIR",
        help="folder for the report; must be new or empty",
    )
    add(
        "--parts",
        nargs="+",
        metavar="PART",
        help=f"parts of the report, some of {', '.join(PARTS)} (default: all but {PARTS[-1]})",
    )
    add("--samples", type=count_from_1, metavar="N", help="use only the first N sentences (default: all)")
    add(
        "--examples", type=count, default=3, metavar="N", help="sentences, of typical lengths, whose attention is shown"
    )
    add_running_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> HeadReport:
    """Analyze, print and write; returns the report. All input is read before the model runs."""
    args = parse(argv)
    check_matplotlib()
    folder = Path(args.output_dir)
    check_output_dir(folder)
    sentences = read_conllu(args.treebank) if args.treebank else None
    texts = {side: lines[: args.samples] for side, lines in read_data(args).items()}
    model, tokenizer, _ = load(args)
    args.max_length = min(args.max_length, longest_input(model, tokenizer) or args.max_length)
    report = analyze_heads(
        model,
        batches_of(args, model, tokenizer, fitting(args, model, tokenizer, texts)),
        parts=args.parts,
        tokenizer=tokenizer,
        treebank=sentences,
        num_examples=args.examples,
        data=", ".join(map(portable_name, args.data)),
    )
    print(report)
    print(f"report: {report.save(folder)}")
    return report
