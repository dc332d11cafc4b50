"""Plan which sites get which query/key projection, and which get narrower values.

With the same width everywhere, the error of a site's output differs severalfold between layers: in a BERT that compares
sentences, early layers need many dimensions and late ones few. `balance_widths` spreads the same number of parameters
so that the worst site's output error is small.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from collab_heads.base.progress import progress_bar
from collab_heads.calibration.calibrate import SiteCalibration
from collab_heads.errors import ArgumentError
from collab_heads.fitting.fit import FitOptions
from collab_heads.fitting.kinds import FITS
from collab_heads.fitting.refine import OutputGap
from collab_heads.fitting.widths import Width, resolve_width, rounded_up, widths_asked
from collab_heads.model.open_layers import OpenLayers, OpenSite
from collab_heads.sites.site import AttentionWeights, select_sites
from collab_heads.sites.state import MixingInit, QueryKeyKind, QueryKeyState, ValueState


@dataclass(frozen=True)
class SitePlan:
    """The plan of a stock site: the query/key projection that it gets.

    Attributes:
        site: the site.
        weights: its weights.
        kind: the kind of the projection.
        dim_asked: the requested width, over all heads.
        dim: R, the planned width.
        mixing_init: the initial mixing, for training from scratch.
    """

    site: OpenSite
    weights: AttentionWeights
    kind: QueryKeyKind
    dim_asked: int
    dim: int
    mixing_init: MixingInit = "concatenate"

    @property
    def is_exact(self) -> bool:
        """Return True if nothing is lost at the planned width."""
        return self.dim >= self.weights.dim_query_key

    def state(self, dim: int | None = None) -> QueryKeyState:
        """Return the state to record for the projection, at the planned width or at `dim`."""
        has_bias = self.weights.query_bias is not None
        dim = self.dim if dim is None else dim
        more = self.mixing_init, self.weights.groups
        return QueryKeyState(self.kind, dim, self.weights.dim_head, self.weights.scale, has_bias, *more)


@dataclass(frozen=True)
class ValuePlan:
    """The plan of the narrower values of a site.

    Attributes:
        site: the site, collaborative or not.
        dim_asked: the requested width, over all value heads.
        dim: the planned width, over all value heads.
        dim_head: d_v of the original module.
    """

    site: OpenSite
    dim_asked: int
    dim: int
    dim_head: int

    @property
    def width(self) -> int:
        """Return the planned width of one value head."""
        return self.dim // self.site.site.num_key_heads

    @property
    def state(self) -> ValueState:
        """Return the state to record for the values."""
        return ValueState(self.width, self.dim_head)


class SitesToChange(NamedTuple):
    """The sites to change, in model order.

    Attributes:
        swapped: sites that get a query/key projection, each with its requested width and its kind.
        narrowed: sites that get narrower values, each with their requested width.
    """

    swapped: list[tuple[OpenSite, Width, QueryKeyKind]]
    narrowed: list[tuple[OpenSite, Width]]


def choose_sites(
    layers: OpenLayers,
    sites: str | Iterable[str] | None,
    asked: Width | Mapping[str, Width],
    asked_value: Width | Mapping[str, Width],
    kind: QueryKeyKind,
) -> SitesToChange:
    """Choose the sites to change, with the requested widths and the kinds.

    If only values are to become narrower, queries and keys keep their weights. A stock site then gets the projection
    that holds these weights unchanged, since stock attention supports only one width.

    Args:
        layers: the layers of the model.
        sites: roles or paths; None for all.
        asked: requested widths of query/key projections.
        asked_value: requested widths of values; None for no site.
        kind: the kind of the query/key projections with a requested width.

    Raises:
        ArgumentError: if a role or a path does not exist, a width is requested for a site that `sites` leaves out, or
            no width is requested at all.
    """
    values = [] if asked_value is None else sites_to_swap(layers, sites, asked_value, "dim_value")
    narrowed: list[tuple[OpenSite, Width]] = [(site, width) for site, width in values if width is not None]
    widths: dict[str, tuple[Width, QueryKeyKind]]
    widths = {site.path: (None, layers.adapter.exact_kind) for site, _ in narrowed if not site.is_swapped}
    if asked is not None or asked_value is None:
        widths |= {site.path: (width, kind) for site, width in sites_to_swap(layers, sites, asked)}
    if not widths and not narrowed:
        raise ArgumentError("dim_value names no width: leave it out, or say how wide values are to be")
    swapped = [(site, *widths[site.path]) for site in layers.with_heads if site.path in widths]
    return SitesToChange(swapped, narrowed)


def plan_values(site: OpenSite, asked: Width) -> ValuePlan:
    """Turn the width requested for the values of a site into one that they can have; a share is of their present width.

    Raises:
        ArgumentError: if the width is out of range.
    """
    dim_asked, width = resolve_width(asked, site.site, site.dim_value, "dim_value"), site.value_width
    state = site.state.values
    dim = rounded_up(dim_asked, site.site.num_key_heads, width)
    return ValuePlan(site, dim_asked, dim, width if state is None else state.dim_head)


def sites_to_swap(
    layers: OpenLayers,
    sites: str | Iterable[str] | None,
    asked: Width | Mapping[str, Width],
    argument: str = "dim_shared_query_key",
) -> list[tuple[OpenSite, Width]]:
    """Return the sites with heads that the user names, each with the width requested for it.

    Raises:
        ArgumentError: if a role or a path does not exist, or a width is requested for a site that `sites` leaves out.
    """
    available = [site.site for site in layers.with_heads]
    widths = widths_asked(available, select_sites(available, sites), asked, argument)
    return [(site, widths[site.path]) for site in layers.with_heads if site.path in widths]


def plan_site(site: OpenSite, asked: Width, kind: QueryKeyKind, mixing_init: MixingInit = "concatenate") -> SitePlan:
    """Read a stock site, and turn the width requested for it into one that its new projection can have.

    Raises:
        ArgumentError: if the width is out of range.
    """
    weights = site.read()
    dim_asked = resolve_width(asked, site.site, weights.dim_query_key)
    return SitePlan(site, weights, kind, dim_asked, FITS[kind].possible_width(dim_asked, weights), mixing_init)


SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)  # of the exact width, at which the error is measured
BISECTIONS = 40
MEASURED_CALLS, MEASURED_OPTIONS = 4, FitOptions(tol=1e-2)  # of the quick decompositions behind a curve


@dataclass(frozen=True)
class Curve:
    """The curve of a site: its output error by width.

    Attributes:
        unit: widths are multiples of it.
        exact: H * d_k, where the error is zero.
        cost: parameters per unit of width.
        points: (width, relative output error), by rising width; between them the error is taken to be linear.
    """

    unit: int
    exact: int
    cost: int
    points: Sequence[tuple[int, float]]

    def error(self, width: int) -> float:
        """Return the error at a width, interpolated linearly between the points."""
        points = self.monotone()
        for (low, high_error), (high, low_error) in itertools.pairwise(points):
            if width <= high:
                return high_error + (low_error - high_error) * (width - low) / (high - low)
        return 0.0

    def width(self, error: float) -> int:
        """Return the smallest width, a multiple of the unit, whose error is at most `error`."""
        widths = range(self.unit, self.exact, self.unit)
        return next((width for width in widths if self.error(width) <= error), self.exact)

    def monotone(self) -> list[tuple[int, float]]:
        """Return width and error of every point, from (0, 1) to (exact, 0), with errors that never rise.

        A larger width can hold the fit of a smaller one, so a larger error is noise of the measurement.
        """
        points, lowest = [(0, 1.0)], 1.0
        for width, error in self.points:
            lowest = min(lowest, error)
            points.append((width, lowest))
        return [*points, (self.exact, 0.0)]


def balance_widths(plans: Sequence[SitePlan], calibration_of: Callable[[str], SiteCalibration]) -> list[SitePlan]:
    """Spread the planned widths over the sites that are not exact, by the output errors of quick decompositions.

    Args:
        plans: one per site.
        calibration_of: path -> calibration of the site, including its calls if the plan is not exact.
    """
    narrow = [plan for plan in plans if not plan.is_exact]
    measured = progress_bar(narrow, desc="measuring widths")
    curves = [site_curve(plan, calibration_of(plan.site.path)) for plan in measured]
    budget = sum(plan.dim * curve.cost for plan, curve in zip(narrow, curves, strict=True))
    widths = dict(zip((plan.site.path for plan in narrow), balance_errors(curves, budget), strict=True))
    return [
        replace(plan, dim=widths[plan.site.path], dim_asked=widths[plan.site.path]) if not plan.is_exact else plan
        for plan in plans
    ]


def site_curve(plan: SitePlan, calibration: SiteCalibration) -> Curve:
    """Measure the curve of a site from quick decompositions at a few widths."""
    weights, kind = plan.weights, FITS[plan.kind]
    fit, every = kind(weights, calibration), math.ceil(len(calibration.calls) / MEASURED_CALLS)
    gap = OutputGap(weights, plan.site.output_weight(), calibration.calls[::every], plan.site.adapter.exact_kind)

    def output_error(width: int) -> float:
        decomposition = fit.decompose(width, MEASURED_OPTIONS)
        return gap.error(fit.projection(plan.state(width), decomposition).to(dtype=gap.dtype))

    unit, cost = kind.width_unit(plan.dim, weights), kind.parameters_per_width(weights)
    return measure_curve(unit, weights.dim_query_key, cost, output_error)


def measure_curve(unit: int, exact: int, cost: int, output_error: Callable[[int], float]) -> Curve:
    """Measure the curve of a site at a few widths.

    Args:
        unit: widths are multiples of it.
        exact: H * d_k.
        cost: parameters per unit of width.
        output_error: width -> relative error of the site's output.
    """
    widths = sorted({min(max(unit, round(share * exact / unit) * unit), exact) for share in SHARES} - {exact})
    return Curve(unit, exact, cost, [(width, output_error(width)) for width in widths])


def balance_errors(curves: Sequence[Curve], budget: int) -> list[int]:
    """Choose a width per site so that the largest error is as small as the budget allows.

    Args:
        curves: one per site.
        budget: total number of parameters, counted as `Curve.cost` times width.

    Returns:
        Widths whose cost is at most the budget, or the smallest possible ones if even these exceed it.
    """

    def cost(widths: Sequence[int]) -> float:
        return sum(width * curve.cost for width, curve in zip(widths, curves, strict=True))

    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if cost([curve.width(middle) for curve in curves]) <= budget:
            high = middle
        else:
            low = middle
    widths = [curve.width(high) for curve in curves]
    while True:  # what rounding leaves over goes where the error is largest
        steps = [
            (-curve.error(width), index)
            for index, (curve, width) in enumerate(zip(curves, widths, strict=True))
            if width < curve.exact and cost(widths) + min(curve.unit, curve.exact - width) * curve.cost <= budget
        ]
        if not steps:
            return widths
        index = min(steps)[1]
        widths[index] = min(widths[index] + curves[index].unit, curves[index].exact)
