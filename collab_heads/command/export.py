"""The work of `collab-heads export`."""

from argparse import Namespace

from collab_heads.command.inputs import load
from collab_heads.serving.export import TARGETS, ExportReport, export


def run(args: Namespace) -> ExportReport:
    """Export a model, print the result, and return the report."""
    TARGETS[args.to].check_installed(args.int8)
    loaded = load(args)
    report = export(loaded.model, args.output_dir, args.to, tokenizer=loaded.tokenizer, int8=args.int8)
    print(report)
    return report
