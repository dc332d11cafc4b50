"""The base classes of parts and of their fits, with helpers that several parts use."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from collab_heads.base.option_values import SitePart
from collab_heads.calibration.calibrate import Calibrations
from collab_heads.calibration.input_moments import InputMoments
from collab_heads.compression.parts.shape import AttentionShape, Choice, Shape
from collab_heads.contract.adapter import Capability
from collab_heads.fitting.fit import FitOptions
from collab_heads.fitting.values import variance
from collab_heads.fitting.widths import HEAD_MULTIPLE
from collab_heads.model.apply_state import OutputWeights, refit_output, undone
from collab_heads.model.open_layers import OpenLayers
from collab_heads.sites.state import QueryKeyKind

QUICK = FitOptions(tol=1e-2, refine_steps=0)  # for the fits of a measurement; values are then fitted quickly, too
LEVELS = 8  # sizes of a part to consider, about; fewer than twice as many


def spread(weight: Tensor, held: InputMoments) -> float:
    """Return the variance of weight @ z, summed over its dimensions.

    Args:
        weight: [D, n], W_O.
        held: the moments of z.
    """
    mean = held.mean()
    return variance(weight, held.second() - mean.outer(mean))


def share(missing: Tensor, bias: Tensor, held: InputMoments, whole: float) -> float:
    """Return the mean square of missing @ z - bias, as a share of a variance.

    Args:
        missing: [D, n], what is missing from W_O.
        bias: [D], what is added to the bias of W_O to compensate.
        held: the moments of z.
        whole: the `spread` of the output.
    """
    lost = variance(missing, held.second()) + float(bias @ bias - 2 * bias @ (missing @ held.mean()))
    return min(max(lost, 0.0) / whole, 1.0) if whole else 0.0


def narrower(width: int, multiple_of: int = 1) -> list[int]:
    """Return the smaller widths to consider: multiples of 4 and of a number, fewer than 2 * `LEVELS` of them."""
    least = math.lcm(HEAD_MULTIPLE, multiple_of)
    unit = max(least, width // LEVELS // least * least)
    return list(range(unit, width, unit))


class Part(ABC):
    """A part of a site that can become smaller.

    Shapes, geometries, sites and states are those of attention or of a feed-forward block, as `shape` says.

    Attributes:
        shape: the class of the shapes of the sites that have such a part.
        name: its name in `parts=` and `Choice`.
        field: the prefix of its sizes in a stored report.
        column: its heading in the report.
        heading: its heading in the table of a plan.
        is_refined: whether its fit is refined at the end of `compress`, so that a plan measures the gain of refinement.
        is_steep: whether its effect on the output grows faster than the error of the site, so that a plan measures it
            at the smallest size, too.
        may_stay: whether it is skipped in families that cannot make it smaller, if other parts are requested, too.
    """

    shape: ClassVar[type[Shape]] = AttentionShape
    name: ClassVar[SitePart]
    field: ClassVar[str]
    column: ClassVar[str]
    heading: ClassVar[str]
    is_refined: ClassVar[bool] = False
    is_steep: ClassVar[bool] = False
    may_stay: ClassVar[bool] = False

    @abstractmethod
    def capability(self, kind: QueryKeyKind) -> Capability:
        """Return the capability that an adapter needs, for query/key projections of a kind."""

    @abstractmethod
    def whole(self, shape: Any) -> int:
        """Return the size that a site has now, counted as in `Choice`."""

    @abstractmethod
    def sizes(self, shape: Any) -> list[int]:
        """Return the smaller sizes to consider, ascending; none if the part cannot become smaller."""

    @abstractmethod
    def resized(self, shape: Any, choice: Choice, geometry: Any) -> Any:
        """Return the geometry with a choice, given the geometry that the parts before this one in the table leave."""

    def allows(self, shape: Any, choice: Choice, geometry: Any) -> bool:
        """Return True if a choice, which gives this geometry, makes sense beside the other parts."""
        return True

    @abstractmethod
    def errors(self, site: Any, shape: Any, fitted: Calibrations, held: Calibrations) -> dict[int, float]:
        """Measure what each of `sizes` costs; calibrations of the site may be taken out once they are used.

        Args:
            site: the site, without gates and alphas.
            shape: the shape of the site.
            fitted: the calibration on the examples to fit to.
            held: the calibration on the examples to measure on, with recorded calls.

        Returns:
            size -> mean square of the change of the site's output, as a share of its variance.
        """

    @abstractmethod
    def fit(self, fitting: "Fitting") -> None:
        """Fit the part to a choice that changes it; the parts before it in the table are fitted already."""

    @abstractmethod
    def resize(self, site: Any, state: Any, shape: Any, geometry: Any) -> Any:
        """Resize a site that is to be timed, with arbitrary weights.

        Args:
            site: the site, in which the parts before this one are resized already.
            state: its recorded state.
            shape: its original shape.
            geometry: the geometry to give it.

        Returns:
            The state to record.
        """

    @abstractmethod
    def total(self, geometry: Any) -> int:
        """Return the size over all heads, for the report."""

    def summary(self, sizes: Sequence[int], wholes: Sequence[int]) -> str:
        """Summarise the sizes that choices leave of some sites, and those that they have, for the table of a plan."""
        return f"{min(sizes)} to {max(sizes)}"

    def cell(self, before: int, after: int, kind: QueryKeyKind | None) -> str:
        """Return the cell of the report; `kind` is that of the query/key projection afterwards, None if stock."""
        return f"{before} -> {after}"

    def size(self, shape: Any, choice: Choice) -> int:
        """Return the size that a choice gives, counted as in `Choice`."""
        size = choice.get(self.name)
        return self.whole(shape) if size is None else size


class Fit(ABC):
    """The fitted weights of one part of a site."""

    @abstractmethod
    def put_into(self, site: Any, state: Any) -> Any:
        """Change a site that has a state, in place; return the state to record. This must not fail."""


@dataclass(frozen=True)
class RefittedOutput(Fit):
    """The fit of the last projection of a site to what the smaller sites before it put out.

    Attributes:
        output: the last projection.
    """

    output: OutputWeights

    def put_into(self, site, state):
        refit_output(site.output, self.output)
        return state


@dataclass
class Fitting:
    """A fit of one site in progress; the model is restored when the context of `stack` ends.

    Attributes:
        layers: the layers of the model, with the fits that were tried out.
        path: the path of the site, which has no gates or alphas.
        shape: the original shape of the site.
        choice: the choice to fit.
        geometry: the geometry of the site with the choice.
        calibrations: the calibration of the unchanged model. A fit removes the entries that it uses.
        options: how queries and keys are fitted.
        stack: the open context.
        fits: the fits of the parts, so far.
    """

    layers: OpenLayers
    path: str
    shape: Any
    choice: Choice
    geometry: Any
    calibrations: Calibrations
    options: FitOptions
    stack: ExitStack
    fits: list[Fit] = field(default_factory=list)

    @property
    def site(self) -> Any:
        """The site, with the fits that were tried out."""
        return self.layers.at(self.path)

    def try_out(self) -> None:
        """Apply the fits so far to the site until the context ends, so that later parts are fitted beside them."""
        self.layers = self.stack.enter_context(undone(self.layers, [self.site]))
        install(self.layers, {self.path: self.fits})


def install(layers: OpenLayers, fitted: Mapping[str, Sequence[Fit]]) -> None:
    """Install fits, path -> fits of the site, in the model. Nothing can fail from here on."""
    states = {}
    for site in layers.named(fitted):
        state: Any = site.state
        for fit in fitted[site.path]:
            state = fit.put_into(site, state)
        if state is not None:  # a table has none
            states[site.path] = state
    layers.write(states)
