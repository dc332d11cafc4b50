"""Spread a budget of query/key width over the sites of a model, so that the worst site's output error is small.

At one width for all, the error of a site's output differs severalfold between layers: in a BERT that compares sentences
early layers need many dimensions, late ones few. The same parameters, moved to where they are missing, keep far more.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from collab_heads.base.display import progress_bar
from collab_heads.collaborative.calibrate import SiteCalibration
from collab_heads.collaborative.fit import FitOptions
from collab_heads.collaborative.kinds import FITS
from collab_heads.collaborative.plan import SitePlan
from collab_heads.collaborative.refine import OutputGap

SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)  # of the exact width: where the error is measured
BISECTIONS = 40
MEASURED_CALLS, MEASURED_OPTIONS = 4, FitOptions(tol=1e-2)  # of the quick decompositions behind a curve


@dataclass(frozen=True)
class Curve:
    """How the output error of a site falls with its width.

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
        """The error at a width."""
        points = self.monotone()
        for (low, high_error), (high, low_error) in itertools.pairwise(points):
            if width <= high:
                return high_error + (low_error - high_error) * (width - low) / (high - low)
        return 0.0

    def width(self, error: float) -> int:
        """The smallest width, a multiple of the unit, whose error is no larger."""
        widths = range(self.unit, self.exact, self.unit)
        return next((width for width in widths if self.error(width) <= error), self.exact)

    def monotone(self) -> list[tuple[int, float]]:
        """Width and error of every point, from (0, 1) to (exact, 0); no error is above that of a smaller width.

        A larger width can hold the fit of a smaller one, so what was measured above it is noise.
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
        calibration_of: path -> what calibration saw, calls included where the plan is not exact.
    """
    narrow = [plan for plan in plans if not plan.is_exact]
    measured = progress_bar(narrow, desc="measuring widths", leave=False)
    curves = [site_curve(plan, calibration_of(plan.site.path)) for plan in measured]
    budget = sum(plan.dim * curve.cost for plan, curve in zip(narrow, curves, strict=True))
    widths = dict(zip((plan.site.path for plan in narrow), balance_errors(curves, budget), strict=True))
    return [
        replace(plan, dim=widths[plan.site.path], dim_asked=widths[plan.site.path]) if not plan.is_exact else plan
        for plan in plans
    ]


def site_curve(plan: SitePlan, calibration: SiteCalibration) -> Curve:
    """Measure how the output error of a site falls with its width."""
    weights, kind = plan.weights, FITS[plan.kind]
    fit, every = kind(weights, calibration), math.ceil(len(calibration.calls) / MEASURED_CALLS)
    gap = OutputGap(weights, plan.site.output_weight(), calibration.calls[::every], plan.site.adapter.exact_kind)

    def output_error(width: int) -> float:
        decomposition = fit.decompose(width, MEASURED_OPTIONS)
        return gap.error(fit.projection(plan.state(width), decomposition).to(dtype=gap.dtype))

    unit, cost = kind.width_unit(plan.dim, weights), kind.parameters_per_width(weights)
    return measure_curve(unit, weights.dim_query_key, cost, output_error)


def measure_curve(unit: int, exact: int, cost: int, output_error: Callable[[int], float]) -> Curve:
    """Measure a site's error at a few widths.

    Args:
        unit: widths are multiples of it.
        exact: H * d_k.
        cost: parameters per unit of width.
        output_error: width -> relative error of the site's output.
    """
    widths = sorted({min(max(unit, round(share * exact / unit) * unit), exact) for share in SHARES} - {exact})
    return Curve(unit, exact, cost, [(width, output_error(width)) for width in widths])


def balance_errors(curves: Sequence[Curve], budget: int) -> list[int]:
    """Choose a width per site: the largest error as small as the budget allows.

    Args:
        curves: one per site.
        budget: parameters in all, in units of `Curve.cost` times width.

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
    while True:  # what rounding left over goes where the error is largest
        steps = [
            (-curve.error(width), index)
            for index, (curve, width) in enumerate(zip(curves, widths, strict=True))
            if width < curve.exact and cost(widths) + min(curve.unit, curve.exact - width) * curve.cost <= budget
        ]
        if not steps:
            return widths
        index = min(steps)[1]
        widths[index] = min(widths[index] + curves[index].unit, curves[index].exact)
