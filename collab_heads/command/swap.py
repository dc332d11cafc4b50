"""The work of `collab-heads swap`."""

from argparse import Namespace

from collab_heads.collaborative.report import SwapReport
from collab_heads.collaborative.swap import swap_to_collaborative
from collab_heads.command.flags.collaborative import check_fit
from collab_heads.command.inputs import calibration, check_class, load
from collab_heads.command.writing import write_model


def run(args: Namespace) -> SwapReport:
    """Swap the attention of a model, print and write the result, and return the report."""
    check_fit(args)
    loaded = load(args)
    check_class(loaded.model)
    report = swap_to_collaborative(
        loaded.model,
        dim_shared_query_key=args.dim_shared_query_key,
        dim_value=args.dim_value,
        kind=args.kind,
        allocation=args.allocation,
        sites=args.sites,
        batches=calibration(args, loaded),
        tol=args.decomposition_tol,
        method=args.decomposition_method,
        refine_steps=args.refine_steps,
        seed=args.seed,
    )
    print(report)
    write_model(args, loaded, "swap", report)
    return report
