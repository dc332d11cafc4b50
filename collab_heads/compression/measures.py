"""The measures of a budget, and the cost of a site by each of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from collab_heads.base.option_values import MEASURES as MEASURES
from collab_heads.base.option_values import FeedForwardRole, Measure, Role
from collab_heads.compression.parts.shape import Choice, Shape
from collab_heads.compression.parts.table import size_with
from collab_heads.compression.workload import Workload

UNITS: Mapping[Measure, str] = {
    "parameters": "parameters of layers",
    "operations": "multiplications of layers on the calibration batches",
    "cache": "cached elements of layers on the calibration batches",
    "time": "seconds of layers per batch",
}


@dataclass(frozen=True)
class SiteUse:
    """The use of a site, on which its cost depends.

    Attributes:
        shape: the shape of the site.
        role: its role.
        work: its tokens and pairs of tokens on the calibration batches.
    """

    shape: Shape
    role: Role | FeedForwardRole
    work: Workload


def parameters(use: SiteUse, choice: Choice) -> float:
    """Count the parameters of the projections, which all calls of a site share."""
    return size_with(use.shape, choice).parameters


def operations(use: SiteUse, choice: Choice) -> float:
    """Count the multiplications of matrix products: projections, scores, the weighted sum of values, feed-forward.

    Element-wise products (scale, mixing, rotations) do not count, nor do the zeros with which a fused kernel pads the
    narrower of keys and values.
    """
    size, work = size_with(use.shape, choice), use.work
    return work.queries * size.per_query + work.keys * size.per_key + work.pairs * size.per_pair


def cache(use: SiteUse, choice: Choice) -> float:
    """Count the elements that a site caches."""
    return use.work.cached * size_with(use.shape, choice).cache


# Time is measured on the machine and for the inputs at hand: see `latency`.
COUNTED: Mapping[Measure, Callable[[SiteUse, Choice], float]] = {
    "parameters": parameters,
    "operations": operations,
    "cache": cache,
}
