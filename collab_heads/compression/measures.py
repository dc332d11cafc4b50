"""The measures of a budget, and the cost of a site by each of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from collab_heads.base.option_values import MEASURES as MEASURES
from collab_heads.base.option_values import Measure
from collab_heads.compression.measurements import Measurements
from collab_heads.compression.parts.shape import Choice, SiteShape
from collab_heads.compression.parts.table import size_with
from collab_heads.compression.workload import Workload
from collab_heads.sites.site import Role

UNITS: Mapping[Measure, str] = {
    "parameters": "parameters of attention",
    "operations": "multiplications of attention on the calibration batches",
    "cache": "cached elements per token",
    "time": "seconds of attention per batch",
}


@dataclass(frozen=True)
class SiteUse:
    """The use of a site, on which its cost depends.

    Attributes:
        shape: the shape of the site.
        role: its role.
        work: its tokens and pairs of tokens on the calibration batches.
        cached: the tokens that it caches in generation, as a share of those of the site that caches most. Models that
            do not generate are counted as if they did.
    """

    shape: SiteShape
    role: Role
    work: Workload
    cached: float = 1.0


def parameters(use: SiteUse, choice: Choice) -> float:
    """Count the parameters of the four projections, which all calls of a site share."""
    return size_with(use.shape, choice).parameters


def operations(use: SiteUse, choice: Choice) -> float:
    """Count the multiplications of matrix products: projections, scores, and the weighted sum of values.

    Element-wise products (scale, mixing, rotations) do not count, nor do the zeros with which a fused kernel pads the
    narrower of keys and values.
    """
    size, work = size_with(use.shape, choice), use.work
    return work.queries * size.per_query + work.keys * size.per_key + work.pairs * size.per_pair


def cache(use: SiteUse, choice: Choice) -> float:
    """Count the elements that a site caches, per token of the site that caches most."""
    return use.work.calls * size_with(use.shape, choice).cache * use.cached


# Time is measured on the machine and for the inputs at hand: see `latency`.
COUNTED: Mapping[Measure, Callable[[SiteUse, Choice], float]] = {
    "parameters": parameters,
    "operations": operations,
    "cache": cache,
}


def uses_of(measured: Measurements) -> dict[str, SiteUse]:
    """Return the use of each site, by path. The encoder of an encoder-decoder runs once, so it caches nothing."""
    work, translates = measured.work, measured.model.config.is_encoder_decoder
    cached = {
        site.path: 0.0 if translates and site.role == "enc-self" else work[site.path].keys / work[site.path].calls
        for site in measured.sites
    }
    most = max(cached.values()) or 1.0
    return {
        site.path: SiteUse(measured.errors[site.path].shape, site.role, work[site.path], cached[site.path] / most)
        for site in measured.sites
    }
