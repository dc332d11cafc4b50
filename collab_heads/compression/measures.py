"""What a budget is of: what a site costs as it would be, by each measure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from collab_heads.compression.choices import Choice, SiteShape, size_of
from collab_heads.sites import Role
from collab_heads.words import MEASURES as MEASURES
from collab_heads.words import Measure

UNITS: Mapping[Measure, str] = {
    "parameters": "parameters of attention",
    "operations": "multiplications of attention per token",
    "cache": "cached elements per token",
    "time": "seconds of attention per batch",
}


@dataclass(frozen=True)
class SiteUse:
    """How a site is used.

    Attributes:
        shape: of it.
        role: of it.
        calls: how often it is called in one forward pass.
        keys: tokens that a query token attends to, on average.
        caches: whether its keys and values are kept while generating; of models that do not generate, as if they were.
    """

    shape: SiteShape
    role: Role
    calls: int
    keys: float
    caches: bool = True


def parameters(use: SiteUse, choice: Choice) -> float:
    """Numbers in its four projections."""
    return size_of(use.shape, choice).parameters


def operations(use: SiteUse, choice: Choice) -> float:
    """Multiplications per token: of the projections, and of scores and values over the keys."""
    size = size_of(use.shape, choice)
    return use.calls * (size.parameters + use.keys * size.score)


def cache(use: SiteUse, choice: Choice) -> float:
    """Elements that are cached per token."""
    return use.calls * size_of(use.shape, choice).cache * use.caches


# Time is measured on the machine and for the inputs at hand: see `latency`.
COUNTED: Mapping[Measure, Callable[[SiteUse, Choice], float]] = {
    "parameters": parameters,
    "operations": operations,
    "cache": cache,
}
