"""Spread a budget of query/key width over the sites of a model, so that the worst site's output error is small.

With the same width everywhere, the error of a site's output differs severalfold between layers: in a BERT that compares
sentences, early layers need many dimensions and late ones few. The same number of parameters preserves far more if it
is moved to where it is needed.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from collab_heads.base.progress import progress_bar
from collab_heads.collaborative.calibrate import SiteCalibration
from collab_heads.collaborative.fit import FitOptions
from collab_heads.collaborative.kinds import FITS
from collab_heads.collaborative.plan import SitePlan
from collab_heads.collaborative.refine import OutputGap

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
