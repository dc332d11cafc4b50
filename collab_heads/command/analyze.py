"""The work of `collab-heads analyze`."""

import sys
from argparse import Namespace

from collab_heads.analysis.analyze import analyze_heads
from collab_heads.analysis.report.head_report import HeadReport
from collab_heads.analysis.treebank.conllu import read_conllu
from collab_heads.base.display import portable_name
from collab_heads.base.extras import missing
from collab_heads.command.inputs import batches_of, load, read_data


def run(args: Namespace) -> HeadReport:
    """Analyze the heads of a model, print and save the report, and return it.

    All input is read before the model runs.
    """
    if missing("plots"):
        print("matplotlib is not installed: no curves and distributions (pip install matplotlib)", file=sys.stderr)
    sentences = read_conllu(args.treebank) if args.treebank else None
    texts = {side: lines[: args.samples] for side, lines in read_data(args).items()}
    model, tokenizer, _ = load(args)
    report = analyze_heads(
        model,
        batches_of(args, model, tokenizer, texts),
        parts=args.parts,
        tokenizer=tokenizer,
        treebank=sentences,
        num_examples=args.examples,
        prefixes=args.prefixes or "reference",
        compare_with=args.compare_with or (),
        data=", ".join(map(portable_name, args.data)),
    )
    print(report.to_string() if args.all_heads else report)
    print(f"report: {report.save(args.output_dir)}")
    return report
