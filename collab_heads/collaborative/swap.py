"""swap_to_collaborative: plan every replacement, then put them all in place."""

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from collab_heads.checks import check_choice
from collab_heads.collaborative.allocate import ALLOCATIONS, Allocation, balance_widths
from collab_heads.collaborative.calibrate import SiteCalibration, calibrate
from collab_heads.collaborative.fit import FitOptions
from collab_heads.collaborative.kinds import FITS, check_kind
from collab_heads.collaborative.plan import SitePlan, plan_site, sites_to_swap
from collab_heads.collaborative.refine import OutputGap, Refinement, refine
from collab_heads.collaborative.report import SiteReport, SwapReport
from collab_heads.collaborative.solvers import Method
from collab_heads.collaborative.widths import Width
from collab_heads.errors import ArgumentError, NonFiniteError, SwapError
from collab_heads.layers.query_key import QueryKey
from collab_heads.model.open_site import OpenSite
from collab_heads.model.refusals import check_swappable, check_wrapper
from collab_heads.numerics import few_threads
from collab_heads.registry import AttentionAdapter, get_adapter
from collab_heads.state import CollabConfig, QueryKeyKind


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One planned change."""

    site: OpenSite
    query_key: QueryKey
    report: SiteReport


@torch.inference_mode(False)  # new parameters are to be trained, in the refinement and after
def swap_to_collaborative(
    model: PreTrainedModel,
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
    dim_shared_query_key: Width | Mapping[str, Width] = None,
    *,
    tol: float = 1e-4,
    calibration: Iterable[Mapping] | None = None,
    mixing: QueryKeyKind = "shared",
    allocation: Allocation = "uniform",
    sites: str | Iterable[str] | None = None,
    method: Method = "als",
    refine_steps: int = 120,
    seed: int = 0,
) -> SwapReport:
    """Replace the query/key projections of a model by collaborative ones, in place.

    The model keeps its class, training mode, dtype, device and hooks; `save_pretrained` and `from_pretrained` work as
    before. On an error it is left as it was. Swap before making the optimizer, and before DDP, FSDP, PEFT or
    `torch.compile`.

    Args:
        model: a supported transformers model, base or with a head.
        adapter: the family's adapter, as class or instance; None looks it up by model type.
        dim_shared_query_key: width R of the projection over all heads: an int for every site; a float in (0, 1] as a
            share of H * d_k; a dict of those by role or path (only the sites it names are swapped); None keeps the
            width, which is exact.
        tol: the alternating least squares stop when a sweep improves the relative error by less.
        calibration: an iterable of input dicts as the model takes them (32 to 512 sentences are enough). The
            decomposition then preserves the scores on such inputs, which is far better than preserving the weights.
        mixing: the kind of query/key projection. "shared" is the paper's layer: every head mixes all R dimensions.
            "per_head" gives every head R / H dimensions (rounded up to a multiple of 4): larger, and faster.
        allocation: "uniform" gives every site the width that was asked for. "balanced" takes these widths as a budget
            of parameters and spreads it so that the worst site's output error is small; sites asked to keep their full
            width keep it. It needs calibration.
        sites: roles ("enc-self", "dec-self", "dec-enc") or paths; None for all.
        method: "als" or "parafac" (tensorly's, on the dense tensor; for comparison).
        refine_steps: with calibration, Adam steps per site. They fit the new projection to the output that the site had
            on the calibration inputs (or on a sample of them, if they are many), without labels and without training
            anything else. 0 leaves the decomposition as it is.
        seed: of the random factors that "parafac" begins with, and of the order of the inputs in the refinement.

    Returns:
        A report with width, relative error, parameters and seconds per site; `print` it.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, or it is wrapped.
        ArgumentError: on a width, role, path, method, mixing or tolerance that cannot work.
        CalibrationError: if the calibration batches are empty or the model cannot take them, or if a site that is to be
            refined or measured does not use transformers' attention interface.
        NonFiniteError: if weights or calibration inputs contain NaN or inf; the site is named.
        SwapError: if a site was swapped already, or cannot be changed safely.

    Source: Cordonnier, Loukas, Jaggi 2020, arXiv:2006.16362; the weighting is ours.
    """
    started = time.perf_counter()
    check_kind(mixing, method=(method, FitOptions.method))
    check_choice("allocation", allocation, ALLOCATIONS)
    options = FitOptions(method, tol, refine_steps, seed)
    if allocation == "balanced" and calibration is None:
        raise ArgumentError("allocation='balanced' measures output errors: pass calibration batches")
    check_wrapper(model)
    plans = plan_sites(model, get_adapter(model, adapter, "collaborative"), sites, dim_shared_query_key, mixing)
    before = model.num_parameters()
    calibrations: dict[str, SiteCalibration] = {}
    if calibration is not None:
        needs_calls = refine_steps > 0 or allocation == "balanced"
        recorded = [plan.site for plan in plans if needs_calls and not plan.is_exact]
        calibrations = calibrate(model, [plan.site for plan in plans], recorded, calibration)
    with few_threads(max(plan.dim for plan in plans)):
        if allocation == "balanced":
            plans = balance_widths(plans, calibrations)
        replacements = [
            fit_site(plan, calibrations.pop(plan.site.path, None), options)
            for plan in tqdm(plans, desc="decomposing", leave=False)
        ]
    put_in_place(model, replacements)
    return SwapReport(
        sites=tuple(replacement.report for replacement in replacements),
        calibrated=calibration is not None,
        seconds=time.perf_counter() - started,
        model_parameters_before=before,
        model_parameters_after=model.num_parameters(),
    )


def plan_sites(
    model: PreTrainedModel,
    adapter: AttentionAdapter,
    sites: str | Iterable[str] | None,
    asked: Width | Mapping[str, Width],
    kind: QueryKeyKind,
) -> list[SitePlan]:
    """Check that the named sites can be swapped, and plan their projections; the errors of `swap_to_collaborative`."""
    if not adapter.sites_with_heads(model):
        raise SwapError("the model has no heads left: there is nothing to swap")
    chosen = sites_to_swap(model, adapter, sites, asked)
    check_swappable(model, adapter, [site for site, _ in chosen])
    plans = [plan_site(site, width, kind) for site, width in chosen]
    for plan in plans:
        for name in ("query", "query_bias", "key", "value"):
            tensor = getattr(plan.weights, name)
            if tensor is not None and not torch.isfinite(tensor).all():
                raise NonFiniteError(f"{plan.site.path}: the {name} contains NaN or inf")
    return plans


def fit_site(plan: SitePlan, calibration: SiteCalibration | None, options: FitOptions) -> Replacement:
    """Decompose one site, refine it on what calibration saw, and report; nothing of the model changes."""
    started = time.perf_counter()
    site, weights = plan.site, plan.weights
    fit = FITS[plan.kind](weights, calibration)
    decomposition = fit.decompose(plan.dim, options)
    query_key, refinement = fit.projection(plan.state(), decomposition), Refinement(None, None)
    if calibration is not None and calibration.calls and options.refine_steps:
        gap = OutputGap(weights, site.output_weight(), calibration.calls)
        refinement = refine(query_key, gap, fit.score_error(gap.dtype), options.refine_steps, options.seed)
    query_key.to(weights.query.device, weights.query.dtype)
    query_key.requires_grad_(any(projection.weight.requires_grad for projection in site.projections))
    query_key.train(site.module.training)
    report = SiteReport(
        path=site.path,
        role=site.role,
        mixing=plan.kind,
        dim=plan.dim,
        dim_asked=plan.dim_asked,
        dim_exact=weights.dim_query_key,
        relative_error=decomposition.relative_error,
        sweeps=decomposition.sweeps,
        output_error_before=refinement.error_before,
        output_error=refinement.error_after,
        parameters_before=sum(p.numel() for projection in site.projections for p in projection.parameters()),
        parameters_after=sum(p.numel() for p in query_key.parameters()),
        cache_before=weights.dim_query_key + weights.dim_value,
        cache_after=query_key.cache_width + weights.dim_value,
        seconds=time.perf_counter() - started,
    )
    return Replacement(site, query_key, report)


def put_in_place(model: PreTrainedModel, replacements: Sequence[Replacement]) -> None:
    """Change the model. Up to here it is as it was; from here on nothing can fail."""
    config = CollabConfig.of(model.config)
    changed = {}
    for replacement in replacements:
        site = replacement.site
        changed[site.path] = dataclasses.replace(config.site(site.site), query_key=replacement.query_key.state)
    record = config.with_sites(changed)
    for replacement in replacements:
        replacement.site.adapter.install(replacement.site.module, replacement.query_key)
    record.write(model)
