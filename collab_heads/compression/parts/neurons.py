"""Remove neurons of a feed-forward block, and refit its last projection for those that stay."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from collab_heads.collaborative.input_moments import InputMoments
from collab_heads.compression.parts.heads import most_costly
from collab_heads.compression.parts.part import LEVELS, Fit, Part
from collab_heads.compression.parts.shape import FeedForwardShape
from collab_heads.heads.reconstruction import missing_square
from collab_heads.model.apply_state import OutputWeights, keep_neurons
from collab_heads.neurons.prune import MULTIPLE
from collab_heads.neurons.regression import NeuronRegression


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
        """Return 0 and at most 2 * `LEVELS` other numbers of neurons, multiples of `MULTIPLE`."""
        if self.name not in shape.parts:
            return []
        unit = max(MULTIPLE, -(-self.whole(shape) // (2 * LEVELS) // MULTIPLE) * MULTIPLE)
        return list(range(0, self.whole(shape), unit))

    def resized(self, shape, choice, geometry):
        neurons = choice.get(self.name)
        return geometry if neurons is None else replace(geometry, neurons=neurons)

    def errors(self, site, shape, fitted, held):
        """Measure the error with the last projection refitted for the neurons that stay."""
        if not self.sizes(shape):
            return {}
        regression = NeuronRegression.of_block(site, fitted.outputs[site.path])
        costs, measure = regression.removal_costs(), HeldOut(regression, held.outputs[site.path])
        return {count: measure.share(most_costly(costs, count)) for count in self.sizes(shape)}

    def fit(self, fitting):
        """Choose the neurons that stay, and refit the last projection."""
        site = fitting.site
        regression = NeuronRegression.of_block(site, fitting.calibrations.outputs.pop(site.path))
        kept = regression.most_costly(fitting.geometry.neurons)
        fitting.fits.append(KeptNeurons(kept, regression.refit(kept)))

    def resize(self, site, state, shape, geometry):
        """Keep the first neurons."""
        return keep_neurons(site, state, range(geometry.neurons))

    def total(self, geometry):
        return geometry.neurons

    def summary(self, choices):
        """Return the share of the neurons that all blocks keep."""
        left = sum(self.size(shape, choice) for shape, choice in choices)
        return f"{left:,} of {sum(self.whole(shape) for shape, _ in choices):,}"


class HeldOut:
    """The error of refitted last projections on examples that they were not fitted to.

    Args:
        regression: the regression of the block.
        held: the moments of its neurons on those examples.
    """

    def __init__(self, regression: NeuronRegression, held: InputMoments):
        self.regression, self.second, self.mean = regression, held.second(), held.mean()
        self.products = regression.weight @ self.second
        self.square = float((self.products * regression.weight).sum())
        self.variance = self.square - float((regression.weight @ self.mean).square().sum())

    def share(self, kept: Sequence[int]) -> float:
        """Return the mean square of the change of the output, as a share of its variance."""
        columns, refit = self.regression.columns(kept), self.regression.refit(kept)
        square = missing_square(self.square, self.products, self.second, columns, refit.weight)
        shift: Tensor = self.regression.weight @ self.mean - refit.weight @ self.mean[columns]
        lost = square + float(refit.bias @ refit.bias - 2 * refit.bias @ shift)
        return min(max(lost, 0.0) / self.variance, 1.0) if self.variance > 0 else 0.0


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
