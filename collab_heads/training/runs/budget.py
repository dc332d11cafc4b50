"""The compression that the flags describe, in the place of a swap."""

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from collab_heads.compression.compress import compress
from collab_heads.compression.measurements import choose_sites
from collab_heads.compression.measures import MEASURES
from collab_heads.compression.parts.shape import UNCHANGED, SiteShape
from collab_heads.compression.parts.table import choices_of, size_with
from collab_heads.compression.report import CompressReport
from collab_heads.errors import ArgumentError
from collab_heads.registry import get_adapter
from collab_heads.training.flags.collaborative import COMPRESSED


def check_compress_flags(args: Namespace, model: PreTrainedModel) -> None:
    """Check early, before hours of training, what the compression would refuse later.

    A budget of parameters is checked; the least of the others is known only when the model has been run.

    Raises:
        CollabHeadsError: if a site cannot be, or cannot be changed, or the budget is too small.
    """
    adapter = get_adapter(model, None, "collaborative")
    kind = args.compress_kind or COMPRESSED
    shapes = [SiteShape.of(site, kind) for site in choose_sites(model, adapter, args.sites)]
    if (args.compress_of or MEASURES[0]) != "parameters":
        return
    least = sum(min(size_with(shape, choice).parameters for choice in choices_of(shape)) for shape in shapes)
    share = least / sum(size_with(shape, UNCHANGED).parameters for shape in shapes)
    if args.compress_budget < share:
        raise ArgumentError(
            f"--compress_budget {args.compress_budget} is below {math.ceil(1000 * share) / 1000}, which the fewest "
            "heads and the smallest widths give"
        )


def compress_as_asked(args: Namespace, model: PreTrainedModel, calibration: Sequence[Mapping] | None) -> CompressReport:
    """Compress as the flags say, fitted to batches."""
    return compress(
        model,
        calibration or (),
        args.compress_budget,
        of=args.compress_of or MEASURES[0],
        sites=args.sites,
        kind=args.compress_kind or COMPRESSED,
        refine_steps=args.refine_steps,
        seed=args.seed,
    )
