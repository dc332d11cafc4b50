"""Helpers of several parts: the error of a changed output projection, and the widths to choose from."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.base.option_values import SitePart
from collab_heads.collaborative.calibrate import Calibrations
from collab_heads.collaborative.fit import FitOptions
from collab_heads.collaborative.input_moments import InputMoments
from collab_heads.collaborative.values import variance
from collab_heads.collaborative.widths import HEAD_MULTIPLE
from collab_heads.compression.parts.shape import Choice, SiteShape
from collab_heads.contract.adapter import Capability
from collab_heads.model.apply_state import undone
from collab_heads.model.open_site import OpenSite, reopened
from collab_heads.model.site_size import Geometry
from collab_heads.sites.record import CollabConfig
from collab_heads.sites.state import QueryKeyKind, SiteState

LEVELS = 8  # sizes of a part that are considered, or a few more


def share(missing: Tensor, bias: Tensor, weight: Tensor, held: InputMoments) -> float:
    """Return the mean square of missing @ z - bias, as a share of the variance of weight @ z.

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


def narrower(width: int) -> list[int]:
    """Return the smaller widths to consider: multiples of 4, at most about `LEVELS` of them."""
    unit = max(HEAD_MULTIPLE, width // LEVELS // HEAD_MULTIPLE * HEAD_MULTIPLE)
    return list(range(unit, width, unit))


class Part(ABC):
    """Something of a site that can become smaller.

    Attributes:
        name: as in `parts=` and `Choice`.
        field: what the names of its sizes begin with in a stored report.
        column: its heading in the report.
        heading: its heading in the table of a plan.
        is_refined: whether its fit is refined at the end of `compress`, so that a plan measures what that leaves of its
            errors.
        may_stay: whether it is left alone in families that cannot make it smaller, where others are asked for, too.
    """

    name: ClassVar[SitePart]
    field: ClassVar[str]
    column: ClassVar[str]
    heading: ClassVar[str]
    is_refined: ClassVar[bool] = False
    may_stay: ClassVar[bool] = False

    @abstractmethod
    def capability(self, kind: QueryKeyKind) -> Capability:
        """Return the capability that an adapter needs, for query/key projections of a kind."""

    @abstractmethod
    def whole(self, shape: SiteShape) -> int:
        """Return the size that a site has now, counted as in `Choice`."""

    @abstractmethod
    def sizes(self, shape: SiteShape) -> list[int]:
        """Return the smaller sizes to consider, ascending; none if the part cannot become smaller."""

    @abstractmethod
    def resized(self, shape: SiteShape, choice: Choice, geometry: Geometry) -> Geometry:
        """Return the geometry with a choice, given the geometry that the parts before this one in the table leave."""

    def allows(self, shape: SiteShape, choice: Choice, geometry: Geometry) -> bool:
        """Return whether a choice, which gives this geometry, makes sense beside the other parts."""
        return True

    @abstractmethod
    def errors(self, site: OpenSite, shape: SiteShape, fitted: Calibrations, held: Calibrations) -> dict[int, float]:
        """Measure what each of `sizes` costs.

        Args:
            site: without gates and alphas.
            shape: of it.
            fitted: what calibration saw on the examples to fit to.
            held: on those to measure on, with recorded calls.

        Returns:
            size -> mean square by which the output of the site moves, as a share of its variance.
        """

    @abstractmethod
    def fit(self, fitting: "Fitting") -> None:
        """Fit the part to a choice that changes it; the parts before it in the table are fitted already."""

    @abstractmethod
    def resize(self, site: OpenSite, state: SiteState, shape: SiteShape, geometry: Geometry) -> SiteState:
        """Resize a site that is to be timed, with weights that mean nothing.

        Args:
            site: the parts before this one are resized already.
            state: what is recorded of it.
            shape: of it as it was.
            geometry: what it is to have.

        Returns:
            The state to record.
        """

    @abstractmethod
    def total(self, geometry: Geometry) -> int:
        """Return the size over all heads, for the report."""

    def summary(self, choices: Sequence[tuple[SiteShape, Choice]]) -> str:
        """Summarise the sizes that choices leave over some sites, for the table of a plan."""
        sizes = [self.size(shape, choice) for shape, choice in choices]
        return f"{min(sizes)} to {max(sizes)}"

    def cell(self, before: int, after: int, kind: QueryKeyKind | None) -> str:
        """Return the cell of the report; `kind` is that of the query/key projection afterwards, None if stock."""
        return f"{before} -> {after}"

    def size(self, shape: SiteShape, choice: Choice) -> int:
        """Return the size that a choice gives, counted as in `Choice`."""
        size = choice.get(self.name)
        return self.whole(shape) if size is None else size


class Fit(ABC):
    """The fitted weights of one part of a site."""

    @abstractmethod
    def put_into(self, site: OpenSite, state: SiteState) -> SiteState:
        """Change a site that has a state, in place; return the state to record. This must not fail."""


@dataclass
class Fitting:
    """A fit of one site under way; the model is as it was when the context of `stack` ends.

    Attributes:
        site: without gates and alphas, as what was tried out leaves it.
        shape: of the site as it was.
        choice: what it is to have.
        geometry: what it has then.
        calibrations: what calibration saw of the unchanged model. They are changed: a fit takes out what it uses.
        options: how queries and keys are fitted.
        stack: open.
        fits: what the parts give, so far.
    """

    site: OpenSite
    shape: SiteShape
    choice: Choice
    geometry: Geometry
    calibrations: Calibrations
    options: FitOptions
    stack: ExitStack
    fits: list[Fit] = field(default_factory=list)

    def try_out(self) -> None:
        """Apply the fits so far to the site until the context ends, so that later parts are fitted beside them."""
        self.stack.enter_context(undone(self.site.model, [self.site]))
        self.site = reopened(self.site)
        install_fits(self.site.model, {self.site.path: self.fits}, [self.site])
        self.site = reopened(self.site)


def install_fits(model: PreTrainedModel, fitted: Mapping[str, Sequence[Fit]], sites: Iterable[OpenSite]) -> None:
    """Change sites of a model: path -> what a site gets. Nothing can fail from here on."""
    config, states = CollabConfig.on(model), {}
    for site in sites:
        if site.path in fitted:
            state = config.site(site.site)
            for fit in fitted[site.path]:
                state = fit.put_into(site, state)
            states[site.path] = state
    config.with_sites(states).write(model)
