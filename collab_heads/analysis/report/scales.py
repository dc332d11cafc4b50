"""The colours of a map: which number has which colour, so that one outlier does not make all other heads look alike."""

from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = 8  # between the nine colours of the page
CROWDED = 0.5  # share of the heads that may look alike; where more do, another scale is tried


@dataclass(frozen=True)
class Scale:
    """Where numbers stand on the colours of a map.

    Attributes:
        name: "linear", "logarithm", or "rank".
        stops: the numbers of the nine colours, in ascending order; between two of them colours are mixed. If the
            numbers have both signs, the fifth is 0.
    """

    name: str
    stops: tuple[float, ...]

    def places(self, values: Tensor) -> Tensor:
        """Return the place of each number, [N], between 0 and `STEPS`."""
        stops = torch.tensor(self.stops, dtype=torch.float64)
        above = torch.searchsorted(stops, values.clamp(stops[0], stops[-1])).clamp(min=1)
        low, high = stops[above - 1], stops[above]
        share = torch.where(high > low, (values - low) / (high - low), 0.5)
        return above - 1 + share.clamp(0, 1)

    def crowded(self, values: Tensor) -> float:
        """Return the largest share of the numbers that are at most one colour apart."""
        places = self.places(values).sort().values
        alike = torch.searchsorted(places, places + 1, right=True) - torch.arange(len(places))
        return float(alike.max()) / len(places)


def scale_of(values: Tensor) -> Scale:
    """Choose a scale: linear, unless most of the numbers [N] would then have nearly the same colour.

    A logarithm is tried first, because it keeps distances, and then ranks.
    """
    values = values.double().flatten()
    linear = Scale("linear", linear_stops(values))
    if linear.crowded(values) <= CROWDED:
        return linear
    others = [Scale("rank", rank_stops(values))]
    if values.min() > 0:
        others.insert(0, Scale("logarithm", log_stops(values)))
    for scale in others:
        if scale.crowded(values) <= CROWDED:
            return scale
    return min([linear, *others], key=lambda scale: scale.crowded(values))


def linear_stops(values: Tensor) -> tuple[float, ...]:
    low, high = float(values.min()), float(values.max())
    if low < 0 < high:
        low, high = -max(-low, high), max(-low, high)
    return tuple(torch.linspace(low, high, STEPS + 1, dtype=torch.float64).tolist())


def log_stops(values: Tensor) -> tuple[float, ...]:
    low, high = values.min(), values.max()
    inner = torch.linspace(0, 1, STEPS + 1, dtype=torch.float64)
    return tuple((low * (high / low) ** inner).tolist())


def rank_stops(values: Tensor) -> tuple[float, ...]:
    """Return quantiles; of both signs the quantiles of sizes, upwards and downwards from 0."""
    if values.min() < 0 < values.max():
        half = torch.linspace(0, 1, STEPS // 2 + 1, dtype=torch.float64)[1:]
        sizes = values.abs().quantile(half)
        return (*(-sizes.flip(0)).tolist(), 0.0, *sizes.tolist())
    return tuple(values.quantile(torch.linspace(0, 1, STEPS + 1, dtype=torch.float64)).tolist())
