"""Fit the replacement of one site and report on it, before the model changes."""

import time
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from collab_heads.calibration.calibrate import Calibrations, SiteCalibration
from collab_heads.calibration.input_moments import InputMoments
from collab_heads.collaborative.plan import SitePlan, ValuePlan
from collab_heads.collaborative.report import SiteReport
from collab_heads.fitting.decompose import Decomposition
from collab_heads.fitting.fit import FitOptions
from collab_heads.fitting.kinds import FITS
from collab_heads.fitting.quick_values import quick_heads
from collab_heads.fitting.refine import OutputGap, Refinement, refine
from collab_heads.fitting.values import NarrowValues, head_moments, narrow_heads, narrow_values
from collab_heads.layers.output import gates_of
from collab_heads.layers.query_key import QueryKey
from collab_heads.layers.values import ValueWeights, read_values
from collab_heads.model.open_layers import OpenSite
from collab_heads.model.site_size import Geometry, size_of
from collab_heads.sites.state import ValueState


@dataclass(frozen=True)
class Replacement:
    """The fitted change of one site.

    Attributes:
        site: the site.
        query_key: the query/key projection that it gets, or has and keeps.
        values: its narrower values; None if it keeps its own.
        value_state: the recorded state of the narrower values; None without them.
        report: the report on both changes.
    """

    site: OpenSite
    query_key: QueryKey
    values: NarrowValues | None
    value_state: ValueState | None
    report: SiteReport


def make_replacement(
    site: OpenSite,
    plan: SitePlan | None,
    value_plan: ValuePlan | None,
    calibrations: Calibrations | None,
    options: FitOptions,
) -> Replacement:
    """Fit the replacement of a site, and remove its entries from `calibrations` to free memory."""
    started = time.perf_counter()
    moments = calibrations or Calibrations()
    query_key, error, sweeps, refinement = site.query_key, 0.0, 0, Refinement(None, None)
    if plan is not None:
        query_key, decomposition, refinement = fit_site(plan, moments.query_key.pop(site.path, None), options)
        error, sweeps = decomposition.relative_error, decomposition.sweeps
    values = None if value_plan is None else fit_values(value_plan, moments.outputs.pop(site.path, None))
    query_key = cast(QueryKey, query_key)  # a site gets one, or has one already
    state, geometry = query_key.state, Geometry.of(site)
    width = geometry.dim_value if value_plan is None else value_plan.width
    before, after = size_of(geometry), size_of(replace(geometry, query_key=state, dim_value=width))
    counts = [size.query_key if value_plan is None else size.parameters for size in (before, after)]
    report = SiteReport(
        path=site.path,
        role=site.role,
        kind=state.kind,
        dim=state.dim,
        dim_asked=state.dim if plan is None else plan.dim_asked,
        dim_exact=site.num_heads * state.dim_head,
        relative_error=error,
        sweeps=sweeps,
        output_error_before=refinement.error_before,
        output_error=refinement.error_after,
        parameters_before=counts[0],
        parameters_after=counts[1],
        cache_before=before.cache * site.site.is_cached,
        cache_after=after.cache * site.site.is_cached,
        seconds=time.perf_counter() - started,
    )
    if value_plan is not None and values is not None:
        report = replace(
            report,
            dim_value=value_plan.dim,
            dim_value_asked=value_plan.dim_asked,
            dim_value_exact=site.dim_value,
            variance_lost=values.variance_lost,
        )
    return Replacement(site, query_key, values, None if value_plan is None else value_plan.state, report)


def fit_site(
    plan: SitePlan, calibration: SiteCalibration | None, options: FitOptions
) -> tuple[QueryKey, Decomposition, Refinement]:
    """Decompose one site and refine it on its recorded calls; the model does not change."""
    site, weights = plan.site, plan.weights
    fit = FITS[plan.kind](weights, calibration)
    decomposition = fit.decompose(plan.dim, options)
    query_key, refinement = fit.projection(plan.state(), decomposition), Refinement(None, None)
    if calibration is not None and calibration.calls and options.refine_steps:
        gap = OutputGap(weights, site.output_weight(), calibration.calls, site.adapter.exact_kind)
        refinement = refine(query_key, gap, fit.score_error(gap.dtype), options.refine_steps, options.seed)
    query_key.to(weights.query.device, weights.query.dtype)
    query_key.requires_grad_(any(projection.weight.requires_grad for projection in site.projections))
    query_key.train(site.module.training)
    return query_key, decomposition, refinement


def fit_values(plan: ValuePlan, seen: InputMoments | None, *, quick: bool = False) -> NarrowValues:
    """Narrow the values of one site, quickly for a measurement; the model does not change."""
    site = plan.site
    weights = read_values(site.value, site.output)
    moments = head_moments(weights, site.groups, seen, has_gates=gates_of(site.output) is not None)
    narrow = narrow_values(weights, site.groups, plan.width, moments, quick_heads if quick else narrow_heads)
    like = weights.value
    value, value_bias, output, output_bias = (
        None if tensor is None else tensor.to(like.device, like.dtype) for tensor in vars(narrow.weights).values()
    )
    stored = ValueWeights(cast(Tensor, value), value_bias, cast(Tensor, output), output_bias)
    return replace(narrow, weights=stored)  # as the model has them: those of all sites wait in memory
