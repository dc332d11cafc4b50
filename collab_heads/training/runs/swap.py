"""The phases of a run, the swap or the compression that its flags describe, and the original to learn from after it."""

import copy
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from accelerate import Accelerator
from transformers import PreTrainedModel

from collab_heads.base.option_values import SITE_PARTS
from collab_heads.base.processes import agreed, copy_from_first
from collab_heads.collaborative.report import SwapReport
from collab_heads.collaborative.swap import swap_to_collaborative
from collab_heads.compression.budgets import check_reach
from collab_heads.compression.choosing import Choosing
from collab_heads.compression.compress import compress
from collab_heads.compression.measures import MEASURES
from collab_heads.compression.options import PlanOptions
from collab_heads.compression.report import CompressReport
from collab_heads.contract.registry import get_adapter
from collab_heads.distillation.examples import check_pair
from collab_heads.errors import ArgumentError, ModelStateError
from collab_heads.fitting.widths import resolve_width, widths_asked
from collab_heads.model.open_layers import OpenLayers
from collab_heads.saving.loading import backend_options, load_or_explain
from collab_heads.saving.rebuild import catch_up
from collab_heads.sites.record import FIELD
from collab_heads.sites.site import select_sites
from collab_heads.training.options.changes import COMPRESSED


def check_compress_flags(args: Namespace, model: PreTrainedModel) -> None:
    """Check early, before hours of training, that the compression will accept the flags.

    A budget of parameters or of bytes is checked against the least that is possible. The least of other measures is
    only known when the model has been run.
    """
    adapter = get_adapter(model, capability="collaborative")
    of, kind, parts = args.compress_of or MEASURES[0], args.compress_kind or COMPRESSED, args.compress_parts
    options = PlanOptions(of, args.sites, parts or SITE_PARTS, kind, args.compress_shape)
    choosing = Choosing.of(OpenLayers.of(model, adapter), options)
    if of not in ("parameters", "bytes"):
        return
    try:
        check_reach(choosing, args.compress_budget)
    except ArgumentError as error:
        raise ArgumentError(f"--compress_budget: {error}") from None


def compress_as_asked(args: Namespace, model: PreTrainedModel, calibration: Sequence[Mapping] | None) -> CompressReport:
    return compress(
        model,
        calibration or (),
        args.compress_budget,
        of=args.compress_of or MEASURES[0],
        sites=args.sites,
        parts=args.compress_parts or SITE_PARTS,
        kind=args.compress_kind or COMPRESSED,
        shape=args.compress_shape,
        refine_steps=args.refine_steps,
        seed=args.seed,
    )


PHASES = {  # --swap -> what happens in each phase: whether it begins with the swap, whether it trains
    None: ((False, True),),
    "before": ((True, True),),
    "after": ((False, True), (True, False)),
    "between": ((False, True), (True, True)),
}


@dataclass(frozen=True)
class Phase:
    """A part of a run that can be resumed.

    Attributes:
        number: counted from 0.
        swaps: whether it begins with the swap.
        trains: whether the model is trained then.
        is_last_training: whether it is the last that trains: heads are then removed, mixed and rotated.
    """

    number: int
    swaps: bool
    trains: bool
    is_last_training: bool

    @property
    def stage(self) -> str:
        """The name of its training in the results."""
        return "fine_tuned_again" if self.number else "fine_tuned"


def phases(swap: Literal["before", "after", "between"] | None) -> tuple[Phase, ...]:
    """Return the phases of a run.

    Args:
        swap: "before", "after" or "between" trainings; None for a run that does not swap.
    """
    plan = PHASES[swap]
    last = max(number for number, (_, trains) in enumerate(plan) if trains)
    return tuple(Phase(number, swaps, trains, number == last) for number, (swaps, trains) in enumerate(plan))


def check_swap_flags(args: Namespace, model: PreTrainedModel) -> None:
    """Check early, before hours of training, that the swap will accept the flags."""
    adapter = get_adapter(model)
    with_heads = adapter.sites_with_heads(model)  # the swap changes no other sites
    only_values = args.dim_value is not None and args.dim_shared_query_key is None
    chosen = select_sites(with_heads, args.sites)
    widths = widths_asked(with_heads, chosen, args.dim_shared_query_key)
    values = widths_asked(with_heads, chosen, args.dim_value, "dim_value")
    paths = {site.path for site in chosen}
    for site in OpenLayers.of(model, adapter).with_heads:
        if site.path not in paths:
            continue
        resolve_width(values.get(site.path), site.site, site.dim_value, "dim_value")
        if only_values or site.path not in widths:
            continue
        if site.is_swapped:
            raise ModelStateError(
                f"{args.model_name_or_path} is collaborative already ({site.path}): leave --collaborative out to "
                "fine-tune it as it is, or start from the original"
            )
        query, _ = site.projections
        resolve_width(widths[site.path], site.site, query.out_features)


def swap(args: Namespace, model: PreTrainedModel, calibration: Sequence[Mapping] | None) -> SwapReport:
    """Swap to collaborative attention as the flags say, calibrated if there are batches."""
    return swap_to_collaborative(
        model,
        dim_shared_query_key=args.dim_shared_query_key,
        dim_value=args.dim_value,
        tol=args.decomposition_tol,
        batches=calibration,
        kind=args.kind,
        allocation=args.allocation,
        sites=args.sites,
        method=args.decomposition_method,
        refine_steps=args.refine_steps,
        seed=args.seed,
    )


def swap_everywhere(
    accelerator: Accelerator, args: Namespace, model: PreTrainedModel, calibration: Sequence[Mapping] | None
) -> SwapReport | CompressReport:
    """Swap or compress the model on the first process and copy the result to all, where last bits could differ.

    Args:
        accelerator: of the run.
        args: the flags: they say whether it is swapped or compressed.
        model: the same on every process; changed in place.
        calibration: batches without labels; None to swap by the weights alone.
    """
    change = swap if args.compress_budget is None else compress_as_asked
    report, record = agreed(accelerator, lambda: (change(args, model, calibration), getattr(model.config, FIELD, None)))
    if not accelerator.is_main_process:
        catch_up(model, record)
    copy_from_first(accelerator, model.parameters())
    return report


def summary(report: SwapReport | CompressReport) -> dict:
    """Return the numbers for `all_results.json`: of a swap, totals, then every site; of a compression all of them."""
    if isinstance(report, CompressReport):
        return report.to_dict()
    errors = [site.relative_error for site in report.sites]
    outputs = [site.output_error for site in report.sites if site.output_error is not None]
    return {
        "decomposition_seconds": report.seconds,
        "mean_relative_error": sum(errors) / len(errors),
        "mean_output_error": sum(outputs) / len(outputs) if outputs else None,
        **report.to_dict(),
    }


def check_original(args: Namespace, model: PreTrainedModel) -> None:
    """Check early, before hours of training, that the model can be distilled from the one that the flags name."""
    if args.distill_from is not None:
        check_pair(model, original_of(args, model))


def original_of(args: Namespace, model: PreTrainedModel) -> PreTrainedModel:
    """Return the model that a changed one will learn from: the one that the flags name, or a copy of this one."""
    if args.distill_from is None:
        return copy.deepcopy(model)
    remote = {"trust_remote_code": args.trust_remote_code} if args.trust_remote_code else {}
    found = load_or_explain(type(model), args.distill_from, dtype=model.dtype, **backend_options(args), **remote)
    return found.to(model.device)
