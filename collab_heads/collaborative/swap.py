"""swap_to_collaborative: plan every replacement, then put them all in place."""

import dataclasses
import functools
import math
import time
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from collab_heads.checks import check_choice, check_count, check_seed
from collab_heads.collaborative.allocate import balance_errors, measure_curve
from collab_heads.collaborative.calibrate import listening
from collab_heads.collaborative.fit import Seen, Target, new_query_key
from collab_heads.collaborative.refine import OutputGap, Refinement, refine
from collab_heads.collaborative.report import SiteReport, SwapReport
from collab_heads.collaborative.solvers import check_method
from collab_heads.collaborative.widths import PER_HEAD_MULTIPLE, Width, per_head_width, plan_widths, resolve_width
from collab_heads.errors import ArgumentError, NonFiniteError, SwapError
from collab_heads.layers.output import dense_weight
from collab_heads.layers.query_key import ALIGNMENT
from collab_heads.model.attention_calls import recording
from collab_heads.model.batches import run_batches
from collab_heads.model.portions import portions
from collab_heads.model.refusals import check_swappable, check_wrapper
from collab_heads.numerics import few_threads
from collab_heads.registry import AttentionAdapter, get_adapter
from collab_heads.sites import AttentionSite, AttentionWeights, select_sites
from collab_heads.state import KINDS, CollabConfig, QueryKeyState

ALLOCATIONS = ("uniform", "balanced")
MEASURED_CALLS, MEASURED_TOL = 4, 1e-2  # of the quick decompositions behind "balanced"


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One planned change."""

    site: AttentionSite
    module: nn.Module
    query_key: nn.Module
    report: SiteReport


@torch.inference_mode(False)  # new parameters are to be trained, in the refinement and after
def swap_to_collaborative(
    model: PreTrainedModel,
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
    dim_shared_query_key: Width | Mapping[str, Width] = None,
    *,
    tol: float = 1e-4,
    calibration: Iterable[Mapping] | None = None,
    mixing: str = "shared",
    allocation: str = "uniform",
    sites: str | Iterable[str] | None = None,
    method: str = "als",
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
        mixing: "shared", the paper's layer: every head mixes all R dimensions; smaller and slower than "per_head",
            where every head has R / H dimensions of its own (rounded up to a multiple of 4).
        allocation: "uniform" gives every site the width that was asked for; "balanced" takes these widths as a budget
            of parameters and spreads it so that the worst site's output error is small (sites asked to keep their full
            width do). It needs calibration.
        sites: roles ("enc-self", "dec-self", "dec-enc") or paths; None for all.
        method: "als" or "parafac" (tensorly's, on the dense tensor; for comparison).
        refine_steps: with calibration, Adam steps per site that fit its new projection to its own output on what was
            recorded, of long calibrations a sample (no labels, nothing else trained); 0 leaves the decomposition as it
            is.
        seed: of random starts ("parafac") and of the order of recorded calls in the refinement.

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
    check_choice("mixing", mixing, KINDS)
    check_choice("allocation", allocation, ALLOCATIONS)
    check_method(method)
    if allocation == "balanced" and calibration is None:
        raise ArgumentError("allocation='balanced' measures output errors: pass calibration batches")
    if mixing == "per_head" and method != "als":
        raise ArgumentError(f"method={method!r} has no meaning for mixing='per_head', which is a plain SVD per head")
    if isinstance(tol, bool) or not isinstance(tol, int | float) or not 0 <= tol < 1:
        raise ArgumentError(f"tol {tol!r} must be a number from 0 to 1")
    check_wrapper(model)
    check_count("refine_steps", refine_steps)
    check_seed(seed)
    adapter = get_adapter(model, adapter, "collaborative")
    available = adapter.sites_with_heads(model)
    if not available:
        raise SwapError("the model has no heads left: there is nothing to swap")
    widths = plan_widths(available, select_sites(available, sites), dim_shared_query_key)
    chosen = [site for site in available if site.path in widths]
    check_swappable(model, adapter, chosen)
    weights = {site.path: read_finite(adapter, model.base_model, site) for site in chosen}
    plan = {site.path: plan_width(site, weights[site.path], widths[site.path], mixing) for site in chosen}
    before = model.num_parameters()
    record = bool(refine_steps) or allocation == "balanced"
    seen = {} if calibration is None else look(model, adapter, chosen, calibration, plan, record)
    replacements = []
    with few_threads(max(width for _, width in plan.values())):
        if allocation == "balanced":
            plan = balanced_plan(model, adapter, chosen, weights, plan, seen, mixing)
        for site in tqdm(chosen, desc="decomposing", leave=False):
            asked, dim = plan[site.path]
            read = weights[site.path]
            state = state_of(mixing, dim, read)
            fit = functools.partial(fit_site, method=method, tol=tol, refine_steps=refine_steps, seed=seed)
            replacements.append(fit(model, adapter, site, read, state, asked, seen.pop(site.path, None)))
    config = CollabConfig.of(model.config)
    record = config.with_sites(
        {r.site.path: dataclasses.replace(config.site(r.site), query_key=r.query_key.state) for r in replacements}
    )
    # Nothing has changed up to here; nothing can fail from here on.
    for replacement in replacements:
        adapter.install(replacement.module, replacement.query_key)
    record.write(model)
    return SwapReport(
        sites=tuple(r.report for r in replacements),
        calibrated=calibration is not None,
        seconds=time.perf_counter() - started,
        model_parameters_before=before,
        model_parameters_after=model.num_parameters(),
    )


def read_finite(adapter: AttentionAdapter, base: nn.Module, site: AttentionSite) -> AttentionWeights:
    """Read a site's weights and check that they are finite."""
    weights = adapter.read(base.get_submodule(site.path))
    for name in ("query", "query_bias", "key", "value"):
        tensor = getattr(weights, name)
        if tensor is not None and not torch.isfinite(tensor).all():
            raise NonFiniteError(f"{site.path}: the {name} contains NaN or inf")
    return weights


def plan_width(site: AttentionSite, weights: AttentionWeights, asked: Width, mixing: str) -> tuple[int, int]:
    """Return (width asked for, width to use), both over all heads."""
    exact = weights.num_heads * weights.dim_head
    width = resolve_width(asked, site, exact)
    return width, width if mixing == "shared" else site.num_heads * per_head_width(width, site, exact)


def balanced_plan(model, adapter, sites, weights, plan, seen, mixing) -> dict[str, tuple[int, int]]:
    """Spread the planned widths over the sites that are not exact, by the output errors of quick decompositions."""
    curves, narrow = [], [site for site in sites if plan[site.path][1] < dim_exact(adapter, model, site)]
    for site in tqdm(narrow, desc="measuring widths", leave=False):
        read, known = weights[site.path], seen[site.path]
        target, calls = Target.of(read, mixing, known), known.calls[:: math.ceil(len(known.calls) / MEASURED_CALLS)]
        gap = OutputGap(read, dense_weight(adapter.output_projection(model, site)), calls)

        def output_error(width: int, site=site, read=read, target=target, gap=gap) -> float:
            state = state_of(mixing, width, read)
            found = target.decompose(state, site.num_heads, "als", MEASURED_TOL, 0)
            return gap.error(new_query_key(read, state, found).to(gap.dtype))

        exact = read.num_heads * read.dim_head
        unit = min(ALIGNMENT, plan[site.path][1]) if mixing == "shared" else site.num_heads * PER_HEAD_MULTIPLE
        cost = read.query.shape[-1] + read.key.shape[-1] + (site.num_heads if mixing == "shared" else 0)
        curves.append(measure_curve(unit, exact, cost, output_error))
    budget = sum(plan[site.path][1] * curve.cost for site, curve in zip(narrow, curves, strict=True))
    return plan | {site.path: (dim, dim) for site, dim in zip(narrow, balance_errors(curves, budget), strict=True)}


def state_of(mixing: str, dim: int, weights: AttentionWeights) -> QueryKeyState:
    """The state of a site of this width."""
    return QueryKeyState(mixing, dim, weights.dim_head, weights.scale, weights.query_bias is not None)


def look(model, adapter, sites, calibration, plan, record) -> dict[str, Seen]:
    """Run the calibration batches: moments of every site and, where asked for and there is an error, its calls."""
    inexact = [site for site in sites if record and plan[site.path][1] < dim_exact(adapter, model, site)]
    masks: dict[str, Tensor | None] = {}
    cut = functools.partial(portions, is_encoder_decoder=model.config.is_encoder_decoder)
    with listening(model, adapter, sites, masks) as listeners, recording(model, adapter, inexact, masks) as recorder:
        run_batches(model, calibration, masks, "calibrating", cut=cut)
    moments = {listener.site.path: listener.moments() for listener in listeners}
    return {path: Seen(*both, recorder.of(path)) for path, both in moments.items()}


def dim_exact(adapter: AttentionAdapter, model: PreTrainedModel, site: AttentionSite) -> int:
    """H * d_k of a site."""
    query, _ = adapter.projections(model.base_model.get_submodule(site.path))
    return query.out_features


def fit_site(model, adapter, site, weights, state, asked, seen, *, method, tol, refine_steps, seed) -> Replacement:
    """Decompose one site, refine it on what calibration saw, and report."""
    started = time.perf_counter()
    module = model.base_model.get_submodule(site.path)
    target = Target.of(weights, state.kind, seen)
    found = target.decompose(state, site.num_heads, method, tol, seed)
    query_key, refinement = new_query_key(weights, state, found), Refinement(None, None)
    if seen is not None and seen.calls and refine_steps:
        gap = OutputGap(weights, dense_weight(adapter.output_projection(model, site)), seen.calls)
        refinement = refine(query_key, gap, target.score_error(gap.dtype), refine_steps, seed)
    projections = adapter.projections(module)
    query_key.to(weights.query.device, weights.query.dtype)
    query_key.requires_grad_(any(projection.weight.requires_grad for projection in projections))
    query_key.train(module.training)
    value_width = weights.num_heads * weights.value.shape[1]
    exact = weights.num_heads * weights.dim_head
    report = SiteReport(
        path=site.path,
        role=site.role,
        mixing=state.kind,
        dim=state.dim,
        dim_asked=asked,
        dim_exact=exact,
        relative_error=found.relative_error,
        sweeps=found.sweeps,
        output_error_before=refinement.error_before,
        output_error=refinement.error_after,
        parameters_before=sum(p.numel() for projection in projections for p in projection.parameters()),
        parameters_after=sum(p.numel() for p in query_key.parameters()),
        cache_before=exact + value_width,
        cache_after=query_key.cache_width + value_width,
        seconds=time.perf_counter() - started,
    )
    return Replacement(site, module, query_key, report)
