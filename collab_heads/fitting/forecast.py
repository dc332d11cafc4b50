"""The seconds and bytes of a calibration and of the fits after it, from the speed of one forward pass.

The constants were measured on encoders from 256 to 1,024 wide.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from collab_heads.calibration.calibrate import FEW, FLOAT64, RECORDED, moment_counts, most_bytes
from collab_heads.fitting.refine import POSITIONS, ROWS
from collab_heads.layers.layout import widths
from collab_heads.model.open_layers import OpenLayerSite, OpenSite
from collab_heads.running.speed import Speed

MOMENT = 0.4  # of a product: an entry of a matrix of moments, for a position
STEP, STEP_BESIDE = 3.4, 1.7e-3  # of the refinement: products by D^2 for a position, and seconds besides
MATRICES = 6  # of n x n in float64 that a fit holds
FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class FitForecast:
    """The seconds and bytes that a calibration and the fits of sites take.

    Attributes:
        model: the model.
        narrowed: the sites whose queries and keys may become narrower.
        sites: those whose outputs are calibrated.
        speed: of the model on the batches.
    """

    model: PreTrainedModel
    narrowed: Sequence[OpenSite]
    sites: Sequence[OpenLayerSite]
    speed: Speed

    @property
    def numbers(self) -> int:
        """The numbers in the moments of all sites."""
        return sum(moment_counts(self.narrowed, self.sites).values())

    @property
    def states(self) -> float:
        """The bytes of the states of an example."""
        return FLOAT32 * self.width(1) * self.speed.positions / self.speed.rows

    def width(self, side: int) -> int:
        """Return the largest width of what last projections read (0), or write (1)."""
        return max((widths(site.output)[side] for site in (*self.narrowed, *self.sites)), default=0)

    def calibration(self) -> float:
        """Return the seconds of a calibration of all sites."""
        speed = self.speed
        return speed.seconds + MOMENT * self.numbers * speed.positions * speed.product

    def refinement(self, steps: int) -> float:
        """Return the seconds in which the queries and keys of a site are refined."""
        width = max((widths(site.output)[1] for site in self.narrowed), default=0)
        positions = max(POSITIONS, ROWS * self.speed.longest)
        return steps * (STEP_BESIDE + STEP * width**2 * positions * self.speed.product_alone)

    def memory(self) -> float:
        """Return the bytes of moments, recorded calls and the matrices of a fit, at most."""
        moments = FLOAT64 * self.numbers
        most = most_bytes(sum(parameter.nbytes for parameter in self.model.parameters()))
        groups = max(moments / most, 1.0)
        calls = 2 * self.states * min(self.speed.rows, RECORDED) * len(self.narrowed) / groups
        matrices = MATRICES * FLOAT64 * self.width(0) ** 2
        return min(moments, most) + min(moments, most / FEW) + calls + matrices
