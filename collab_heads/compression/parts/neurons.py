"""Remove neurons of a feed-forward block, and refit its last projection for those that stay."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from collab_heads.base.memory import give_back_memory
from collab_heads.calibration.calibrate import Calibrations
from collab_heads.compression.parts.part import LEVELS, Fit, Part
from collab_heads.compression.parts.shape import FeedForwardShape
from collab_heads.fitting.head_regression import by_cost, most_costly
from collab_heads.fitting.neuron_regression import NeuronRegression, refit_errors
from collab_heads.heads.prune_neurons import MULTIPLE
from collab_heads.model.apply_state import OutputWeights, keep_neurons
from collab_heads.model.open_layers import OpenFeedForward


class Neurons(Part):
    """The number of neurons of a feed-forward block; without any, its output is a constant."""

    shape = FeedForwardShape
    name, field, column, heading = "neurons", "neurons", "neurons", "neurons"
    may_stay = True

    def capability(self, kind):
        return "neurons"

    def whole(self, shape):
        """Return F."""
        return shape.geometry.neurons

    def sizes(self, shape):
        """Return 0 and at most 2 * `LEVELS` other numbers of neurons, multiples of `MULTIPLE` and of `multiple_of`."""
        if self.name not in shape.parts:
            return []
        least = math.lcm(MULTIPLE, shape.multiple_of)
        unit = max(least, -(-self.whole(shape) // (2 * LEVELS) // least) * least)
        return list(range(0, self.whole(shape), unit))

    def resized(self, shape, choice, geometry):
        neurons = choice.get(self.name)
        return geometry if neurons is None else replace(geometry, neurons=neurons)

    def errors(self, site, shape, fitted, held):
        """Measure the error with the last projection refitted for the neurons that stay."""
        if not self.sizes(shape):
            return {}
        regression = regression_of(site, fitted)
        costs = fitted.orders[site.path] = regression.removal_costs()
        give_back_memory()
        return refit_errors(regression, by_cost(costs), self.sizes(shape), held.outputs.pop(site.path))

    def fit(self, fitting):
        """Choose the neurons that stay, and refit the last projection."""
        site = fitting.site
        regression = regression_of(site, fitting.calibrations)
        costs = fitting.calibrations.orders.get(site.path)
        kept = most_costly(regression.removal_costs() if costs is None else costs, fitting.geometry.neurons)
        fitting.fits.append(KeptNeurons(kept, regression.output(kept).rounded(site.output)))

    def resize(self, site, state, shape, geometry):
        """Keep the first neurons."""
        return keep_neurons(site, state, range(geometry.neurons))

    def total(self, geometry):
        return geometry.neurons

    def summary(self, sizes, wholes):
        """Return the number of neurons that all blocks keep, and that they have."""
        return f"{sum(sizes):,} of {sum(wholes):,}"


def regression_of(site: OpenFeedForward, seen: Calibrations) -> NeuronRegression:
    """Return the regression of a block, which takes the place of its moments."""
    if site.path not in seen.regressions:
        seen.regressions[site.path] = NeuronRegression.of_block(site, seen.outputs.pop(site.path))
    return seen.regressions[site.path]


@dataclass(frozen=True)
class KeptNeurons(Fit):
    """The fit of fewer neurons: those that stay.

    Attributes:
        kept: their indices, ascending.
        output: the last projection, refitted for them.
    """

    kept: Sequence[int]
    output: OutputWeights

    def put_into(self, site, state):
        return keep_neurons(site, state, self.kept, self.output)
