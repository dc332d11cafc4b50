"""Measure how the squared error of the model's output grows with that of each part of each site.

Everything is measured with one change in the model itself, on examples that no fit sees.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collab_heads.base.numerics import few_threads
from collab_heads.calibration.calibrate import Calibrations
from collab_heads.compression import bits
from collab_heads.compression.measured_sites import MeasuredPart, MeasuredSite
from collab_heads.compression.parts.part import QUICK, install
from collab_heads.compression.parts.shape import Choice, Shape
from collab_heads.compression.parts.table import fit_site, parts_of
from collab_heads.compression.probe import Probe
from collab_heads.fitting.fit import FitOptions
from collab_heads.layers.layout import widths
from collab_heads.model.apply_state import undone
from collab_heads.model.open_layers import OpenLayers, OpenLayerSite, OpenPart, OpenSite, OpenTable

EXAMPLE = 0.1  # squared error of a site at which its sensitivity is measured: as large as errors of interest are
REFINED_SITES = 4  # sites on which the gain of refinement is measured


@dataclass(frozen=True)
class SiteErrors:
    """The squared errors of one site, or of the output of the model with them.

    Attributes:
        shape: the shape of the site.
        errors: part, or "bits" -> size, as in `Choice` -> squared error, by rising size. Those of a site are those of
            its output, and of its weights for bits.
    """

    shape: Shape
    errors: Mapping[str, Mapping[int, float]]

    def of(self, choice: Choice) -> dict[str, float]:
        """Return the squared error of each part of a choice."""
        sizes: dict[str, int] = dict(choice.sizes)
        if choice.bits is not None:
            sizes[bits.NAME] = choice.bits
        return {part: errors.get(sizes[part], 0.0) if part in sizes else 0.0 for part, errors in self.errors.items()}

    def example(self, part: str, error: float) -> Choice | None:
        """Return the choice of one part with the squared error nearest to `error`; None if the part cannot change.

        Size 0 is not an example: the output of a model without a site says little about small errors of the site.
        """
        squares = self.used(part)
        size = min(squares, key=lambda size: abs(math.log(squares[size] / error)), default=None)
        return None if size is None else Choice.of(**{part: size})

    def used(self, part: str) -> dict[int, float]:
        """Return the sizes of a part that leave some of it, and cost something: size -> squared error."""
        return {size: square for size, square in self.errors.get(part, {}).items() if size and square > 0}


class Sensitivities:
    """Measures how the squared error of the model's output grows with that of each part of each site.

    On a few sites it also measures the share of the error that refinement leaves.

    Args:
        layers: the layers of the model, which is unchanged afterwards.
        sites: those that may change.
        probe: measures the error of the output.
        options: the options of the final fits.
    """

    def __init__(self, layers: OpenLayers, sites: Sequence[OpenLayerSite], probe: Probe, options: FitOptions):
        self.layers, self.probe, self.options, self.starts = layers, probe, options, probe.starts(sites)
        attention = [site.path for site in sites if isinstance(site, OpenSite)]
        self.refined = set(attention[:: -(-len(attention) // REFINED_SITES) or 1]) if options.refine_steps else set()

    def measure(self, site: OpenLayerSite, errors: SiteErrors, seen: Calibrations) -> MeasuredSite:
        """Measure the next site; return what was measured of its parts.

        Args:
            site: the site, in model order.
            errors: of its parts, in fits without refinement.
            seen: its calibration on the examples to fit to.
        """

        def moved(choice: Choice, options: FitOptions) -> float:
            """Return the squared error of the output when the site has a choice."""
            with few_threads(widths(site.output)[0]):
                fit = fit_site(self.layers, site.path, errors.shape, choice, seen.copied(), options)
            self.starts.advance(site.path)
            with undone(self.layers, [site]) as tried, self.starts.at(site.path):
                install(tried, {site.path: fit})
                return self.probe.error() ** 2

        found = {name: MeasuredPart(squares) for name, squares in errors.errors.items()}
        for name, part in parts_of(errors.shape).items():
            if (choice := errors.example(name, EXAMPLE)) is None:
                continue
            (size,) = dict(choice.sizes).values()
            error, left = moved(choice, QUICK), None
            if part.is_refined and site.path in self.refined and error:
                left = min(moved(choice, self.options) / error, 1.0)
            outputs = {size: error}
            if part.is_steep and (least := min(errors.used(name))) != size:
                outputs[least] = max(moved(Choice.of(**{name: least}), QUICK), error)
            found[name] = MeasuredPart(errors.errors[name], outputs, left)
        if errors.shape.bits:
            with self.starts.at(site.path):
                found[bits.NAME] = self.of_bits(site, errors.shape)
        return found

    def of_table(self, table: OpenTable, shape: Shape) -> MeasuredSite:
        """Measure a table."""
        return {bits.NAME: self.of_bits(table, shape)}

    def of_bits(self, site: OpenPart, shape: Shape) -> MeasuredPart:
        """Measure the errors of the weights on grids, and what the largest of them does to the output."""
        errors = SiteErrors(shape, {bits.NAME: bits.rounding_errors(site, shape)})
        if (choice := errors.example(bits.NAME, EXAMPLE)) is None or choice.bits is None:
            return MeasuredPart(errors.errors[bits.NAME])
        with undone(self.layers, [site]) as tried:
            install(tried, {site.path: [bits.rounded(site, choice.bits)]})
            error = self.probe.error() ** 2
        if not isinstance(site, OpenTable):
            error *= bits.GRID_LEAVES
        return MeasuredPart(errors.errors[bits.NAME], {choice.bits: error})


def with_refinement(measured: Mapping[str, MeasuredSite]) -> dict[str, dict[str, dict[int, float]]]:
    """Return path -> part -> size -> squared error of the output.

    For parts that are refined in the end, the error is multiplied by the share that refinement leaves, the geometric
    mean over the sites where it was measured.
    """
    left: dict[str, list[float]] = {}
    for of in measured.values():
        for name, part in of.items():
            if part.left is not None:
                left.setdefault(name, []).append(part.left)
    shares = {name: math.prod(some) ** (1 / len(some)) for name, some in left.items()}
    return {
        path: {
            name: {size: square * shares.get(name, 1.0) for size, square in part.effects().items()}
            for name, part in of.items()
        }
        for path, of in measured.items()
    }
