"""The work of `collab-heads fold`."""

from argparse import Namespace

from collab_heads.command.inputs import check_class, load
from collab_heads.command.writing import write_model
from collab_heads.heads.fold import fold_heads
from collab_heads.heads.report import FoldReport


def run(args: Namespace) -> FoldReport:
    """Fold the heads of a model, print and write the result, and return the report."""
    loaded = load(args)
    check_class(loaded.model)
    report = fold_heads(loaded.model)
    print(report)
    write_model(args, loaded, "fold", report)
    return report
