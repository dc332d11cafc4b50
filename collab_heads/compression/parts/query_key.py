"""Narrow queries and keys: replace the stock query/key projection by a collaborative one."""

import math
from dataclasses import dataclass, replace
from typing import cast

import torch

from collab_heads.collaborative.plan import SitePlan, plan_site
from collab_heads.collaborative.replacement import fit_site
from collab_heads.compression.parts.part import QUICK, Fit, Fitting, Part, narrower
from collab_heads.fitting.fit import SiteFit
from collab_heads.fitting.kinds import FITS
from collab_heads.fitting.refine import OutputGap
from collab_heads.layers.query_key import QueryKey
from collab_heads.model.apply_state import SiteWeights, apply_state
from collab_heads.sites.state import DIVIDED, QueryKeyState

MEASURED_CALLS = 4  # of the recorded calls of a site


class QueryKeys(Part):
    """The width of queries and keys: of one head if the kind divides the projection among heads, else of all heads."""

    name, field, column, heading = "query_key", "query_key", "query/key", "query/key width"
    is_refined = True
    is_steep = True
    may_stay = True

    def capability(self, kind):
        return FITS[kind].capability

    def whole(self, shape):
        """Return the width of the original projection, per head if the kind divides it."""
        return shape.geometry.dim_head * (1 if shape.kind in DIVIDED else shape.geometry.num_heads)

    def sizes(self, shape):
        """Return no size if the site has a collaborative projection already."""
        if shape.geometry.query_key is not None or self.name not in shape.parts:
            return []
        return narrower(self.whole(shape), 1 if shape.kind in DIVIDED else shape.multiple_of)

    def resized(self, shape, choice, geometry):
        width = choice.get(self.name)
        if width is None or not geometry.num_heads:
            return geometry
        dim = width * (geometry.num_heads if shape.kind in DIVIDED else 1)
        bias, groups = geometry.biases[0], geometry.groups
        return replace(
            geometry, query_key=QueryKeyState(shape.kind, dim, geometry.dim_head, shape.scale, bias, groups=groups)
        )

    def allows(self, shape, choice, geometry):
        """Return True unless the projection is wider than the original one of the heads that stay."""
        return choice.get(self.name) is None or geometry.query_key_width <= geometry.num_heads * geometry.dim_head

    def errors(self, site, shape, fitted, held):
        """Measure the error of the output on recorded calls with each width, decomposed without refinement."""
        if not self.sizes(shape):
            return {}
        weights, calls = site.read(), held.query_key[site.path].calls
        calls = calls[:: math.ceil(len(calls) / MEASURED_CALLS)]
        gap = OutputGap(weights, site.output_weight(), calls, site.adapter.exact_kind)
        fit, errors = FITS[shape.kind](weights, fitted.query_key[site.path]), {}
        for width in self.sizes(shape):
            plan = plan_site(site, width * (site.num_heads if shape.kind in DIVIDED else 1), shape.kind)
            errors[width] = min(gap_of(plan, fit, gap), 1.0)
        return errors

    def fit(self, fitting):
        fitting.fits.append(fitted_projection(fitting))

    def resize(self, site, state, shape, geometry):
        """Fill the projection with small numbers, since denormal ones change the time.

        They differ between its weights: equal ones become one in a graph, which two products would share.
        """
        keeps_values = geometry.dim_value == shape.geometry.dim_value
        if geometry.query_key is None or site.is_swapped or (shape.geometry.query_key is not None and keeps_values):
            return state  # last case: heads were removed, and a stock forward runs those that are left
        state = replace(state, query_key=geometry.query_key)
        apply_state(site, state)
        with torch.no_grad():
            for place, parameter in enumerate(site.query_key.parameters()):
                row = torch.linspace(1e-2 / (place + 2), 1e-2, parameter.shape[-1])
                parameter.copy_(row.expand_as(parameter))
        for indices in site.query_key.buffers():
            indices.zero_()
        return state

    def total(self, geometry):
        return geometry.query_key_width

    def cell(self, before, after, kind):
        """Append the kind if the width differs."""
        return super().cell(before, after, kind) + ("" if kind is None or before == after else f" {kind}")


@dataclass(frozen=True)
class Projection(Fit):
    """The fitted query/key projection of a site."""

    query_key: QueryKey

    def put_into(self, site, state):
        state = replace(state, query_key=self.query_key.state)
        apply_state(site, state, SiteWeights(query_key=self.query_key))
        return state


def fitted_projection(fitting: Fitting) -> Projection:
    """Fit the query/key projection of the geometry that a site is to have."""
    site, state = fitting.site, cast(QueryKeyState, fitting.geometry.query_key)
    plan = plan_site(site, state.dim, state.kind)
    seen = fitting.calibrations.query_key.pop(site.path, None)
    return Projection(fit_site(plan, seen, fitting.options)[0])


def gap_of(plan: SitePlan, fit: SiteFit, gap: OutputGap) -> float:
    """Return the squared relative error of the site's output with a quick decomposition."""
    projection = fit.projection(plan.state(), fit.decompose(plan.dim, QUICK))
    return gap.error(projection.to(dtype=gap.dtype)) ** 2
