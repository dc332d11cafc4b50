"""How the error of a site rises with fewer heads, narrower queries and keys, and narrower values.

Everything is fitted to some calibration examples and measured on others: on the same ones, narrow values and refitted
heads look better than they are. Errors are squares: the mean square by which the output of the site moves, as a share
of its variance. The three add up, nearly, as long as they are small.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from collab_heads.collaborative.calibrate import Calibrations
from collab_heads.collaborative.fit import FitOptions, SiteFit
from collab_heads.collaborative.input_moments import InputMoments
from collab_heads.collaborative.kinds import FITS
from collab_heads.collaborative.plan import SitePlan, plan_site
from collab_heads.collaborative.refine import OutputGap
from collab_heads.collaborative.values import head_moments, narrow_heads, variance
from collab_heads.compression.choices import Choice, Part, SiteShape
from collab_heads.compression.fitting import head_regression, most_costly
from collab_heads.layers.values import read_values
from collab_heads.model.open_site import OpenSite
from collab_heads.numerics import float64

QUICK = FitOptions(tol=1e-2, refine_steps=0)  # of the fits behind a curve
MEASURED_CALLS = 4  # of the recorded calls of a site


@dataclass(frozen=True)
class SiteCurves:
    """The squared errors of one site.

    Attributes:
        shape: of the site.
        errors: part -> what of it is left (heads, or a width as in `Choice`) -> squared error, by rising size. What is
            left may be nearly all, but not all: that has no error.
    """

    shape: SiteShape
    errors: Mapping[Part, Mapping[int, float]]

    def parts(self, choice: Choice) -> dict[Part, float]:
        """The squared error that a choice makes by each part."""
        left: dict[Part, int | None] = {"heads": choice.heads, "query_key": choice.query_key, "values": choice.value}
        return {part: self.errors[part].get(size, 0.0) if size is not None else 0.0 for part, size in left.items()}

    def example(self, part: Part, error: float) -> Choice | None:
        """The choice that changes one part, with the squared error nearest to one; None where nothing can change."""
        curve = {left: square for left, square in self.errors[part].items() if square > 0}
        if not curve:
            return None
        nearest = min(curve, key=lambda left: abs(math.log(curve[left] / error)))
        whole = self.shape.unchanged
        return {
            "heads": Choice(nearest, None, whole.value),
            "query_key": Choice(whole.heads, nearest, whole.value),
            "values": Choice(whole.heads, None, nearest),
        }[part]


def site_curves(site: OpenSite, shape: SiteShape, fitted: Calibrations, held: Calibrations) -> SiteCurves:
    """Measure a site.

    Args:
        site: without gates and alphas.
        shape: of it.
        fitted: what calibration saw on the examples to fit to.
        held: on those to measure on, with recorded calls.
    """
    moments, held_moments = fitted.heads[site.path], held.heads[site.path]
    return SiteCurves(
        shape,
        {
            "heads": falling(head_errors(site, shape, moments, held_moments)),
            "query_key": falling(query_key_errors(site, shape, fitted, held)),
            "values": falling(value_errors(site, shape, moments, held_moments)),
        },
    )


def falling(errors: Mapping[int, float]) -> dict[int, float]:
    """No error above that of less: what is larger can hold what is smaller, so what was measured above it is noise."""
    sizes = sorted(errors)
    return dict(zip(sizes, itertools.accumulate((errors[size] for size in sizes), min), strict=True))


def head_errors(site: OpenSite, shape: SiteShape, moments: InputMoments, held: InputMoments) -> dict[int, float]:
    """Number of heads -> error, W_O refitted for them."""
    if not shape.head_counts():
        return {}
    regression = head_regression(site, moments)
    costs, errors = regression.removal_costs(), {}
    for count in shape.head_counts():
        kept = most_costly(costs, shape.key_heads(Choice(count, None, shape.dim_value)))
        refit, missing = regression.refit(kept), regression.weight.clone()
        missing[:, regression.columns(kept)] -= refit.weight
        errors[count] = share(missing, refit.bias, regression.weight, held)
    return errors


def value_errors(site: OpenSite, shape: SiteShape, moments: InputMoments, held: InputMoments) -> dict[int, float]:
    """Width of a value head -> error."""
    weights = read_values(site.value, site.output)
    shown, output = head_moments(weights, site.groups, moments, has_gates=False), float64(weights.output)
    errors = {}
    for width in shape.value_widths():
        lost = narrow_heads(weights, site.groups, width, shown).lost
        errors[width] = share(lost, lost @ shown.mean, output, held)
    return errors


def share(missing: Tensor, bias: Tensor, weight: Tensor, held: InputMoments) -> float:
    """The mean square of missing @ z - bias, as a share of the variance of weight @ z.

    Args:
        missing: [D, n], what of W_O is lost.
        bias: [D], what W_O's bias gained for it.
        weight: [D, n], W_O.
        held: the moments of z.
    """
    second, mean = held.second(), held.mean()
    lost = variance(missing, second) + float(bias @ bias - 2 * bias @ (missing @ mean))
    whole = variance(weight, second - mean.outer(mean))
    return min(max(lost, 0.0) / whole, 1.0) if whole else 0.0


def query_key_errors(site: OpenSite, shape: SiteShape, fitted: Calibrations, held: Calibrations) -> dict[int, float]:
    """Width of the query/key projection -> error, by the output that recorded calls give with it."""
    if not shape.query_key_widths():
        return {}
    calls = held.query_key[site.path].calls
    weights = site.read()
    calls = calls[:: math.ceil(len(calls) / MEASURED_CALLS)]
    gap = OutputGap(weights, site.output_weight(), calls, site.adapter.exact_kind)
    fit, errors = FITS[shape.kind](weights, fitted.query_key[site.path]), {}
    for width in shape.query_key_widths():
        plan = plan_site(site, shape.dim_query_key(Choice(shape.num_heads, width, shape.dim_value)), shape.kind)
        errors[width] = min(gap_of(plan, fit, gap), 1.0)
    return errors


def gap_of(plan: SitePlan, fit: SiteFit, gap: OutputGap) -> float:
    """The squared error of a decomposition."""
    projection = fit.projection(plan.state(), fit.decompose(plan.dim, QUICK))
    return gap.error(projection.to(dtype=gap.dtype)) ** 2
