"""The plan of a compression as a value: solved at any budget, drawn, saved and loaded."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from collab_heads.base.checks import check_choice, is_index
from collab_heads.base.option_values import MODEL_SHAPES, ModelShape
from collab_heads.base.progress import progress_bar
from collab_heads.base.report import for_people, text_table
from collab_heads.compression.budgets import Budgets
from collab_heads.compression.choosing import Choosing
from collab_heads.compression.fitting import fit_choices, fitted_error
from collab_heads.compression.measurements import Measurements
from collab_heads.compression.measures import UNITS, Measure
from collab_heads.compression.options import PlanOptions
from collab_heads.compression.parts.shape import UNCHANGED, Choice
from collab_heads.compression.parts.table import PARTS, wholes_of
from collab_heads.compression.planned_site import PlannedSite, is_amount
from collab_heads.compression.spending import AnySpending, Option
from collab_heads.errors import ArgumentError
from collab_heads.files.reading import read_document, write_document
from collab_heads.model.opened import opened
from collab_heads.model.site_size import FLOAT
from collab_heads.plots.curves import budget_curve
from collab_heads.sites.state import expect

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 2  # of the file of a plan
POINTS = 64  # of a curve
TABLE_BUDGETS = (0.9, 0.75, 0.66, 0.5, 0.4, 0.33, 0.25, 0.2, 0.15, 0.1)

Choices = Mapping[str, Choice]


@dataclass(eq=False)
class CompressionPlan:
    """The plan of a compression: the predicted error at every budget, and what each site gets under it.

    It is a value: `save` stores it, `load` reads it, and both solve it at any budget. `print` it for a table, or draw
    it with `picture`.

    Attributes:
        options: the options that it was made with.
        shape: which sizes sites may have beside each other.
        sites: the sites that may change, in model order.
        allowed: sets of choices, as indices per site; within a set every site may take any of its own.
        measured: what choices are fitted with; None in a plan that was loaded.
        seconds: the time that `plan` took to make it.
        rest: the bytes of the model's other weights.
    """

    options: PlanOptions
    shape: ModelShape
    sites: tuple[PlannedSite, ...]
    allowed: list[list[list[int]]]
    measured: Measurements | None = None
    seconds: float = 0.0
    rest: float = 0.0

    def __post_init__(self) -> None:
        self.spending = AnySpending([site.options for site in self.sites], self.allowed)
        self.by_path = {site.path: site for site in self.sites}
        self.budgets = Budgets(
            self.of, self.whole, self.spending.least, self.rest, self.shape, has_bits=self.options.has_bits
        )

    @property
    def of(self) -> Measure:
        """The measure of budgets."""
        return self.options.of

    @functools.cached_property
    def whole(self) -> float:
        """The present cost of the sites that may change, in the units of `of`."""
        return sum(site.costs[-1] for site in self.sites)

    def option(self, path: str, choice: Choice) -> Option:
        """Return the cost of a choice, and what it adds to the squared error of the output.

        Args:
            path: the path of a site that may change.
            choice: the sizes of its parts.
        """
        return self.by_path[path].by_choice[choice]

    @property
    def least(self) -> float:
        """Return the smallest possible budget, as a share."""
        return self.spending.least / self.whole

    @property
    def least_error(self) -> float:
        """Return the smallest predicted error of the output among all changes."""
        return math.sqrt(min((error for site in self.sites for error in site.errors[:-1]), default=0.0))

    def share_of(self, budget: float | str, written: float = 1.0) -> float:
        """Return a budget that can be reached as a share of `whole`.

        Args:
            budget: a share, or the size of the whole model's weights, as in "10MB".
            written: the bytes of a weight in the file, as a share of those that it has here: 0.5 for a model that was
                loaded in float32 and will be written in half precision.

        Raises:
            ArgumentError: if it is neither, or a size and the plan is not of bytes; if the fewest heads and neurons and
                the smallest widths take more, or a size is above that of the model.
        """
        return self.budgets.share_of(budget, written)

    def choose(self, budget: float | str) -> dict[str, Choice]:
        """Choose what each site gets under a budget: path -> choice.

        Args:
            budget: a share of `whole`, or a size of the whole model, see `share_of`.

        Raises:
            ArgumentError: as `share_of`.
        """
        return self.cheapest(self.share_of(budget))

    def cheapest(self, budget: float) -> dict[str, Choice]:
        """Choose what each site gets under a budget that can be reached, 0 included where nothing need be left.

        Args:
            budget: a share of `whole`, not below `least`.
        """
        if budget == 1:  # changes nothing, not even where this would cost no error
            return dict.fromkeys(self.by_path, UNCHANGED)
        return self.named(self.spending.choose(largest(budget * self.whole, lambda cost: cost / self.whole <= budget)))

    def within(self, error: float) -> dict[str, Choice]:
        """Choose the cheapest sites whose predicted error of the output is at most `error`: path -> choice.

        Args:
            error: an error of the output, as `compress` measures it.
        """
        return self.named(self.spending.within(largest(error * error, lambda square: math.sqrt(square) <= error)))

    def named(self, indices: Sequence[int]) -> dict[str, Choice]:
        """Turn indices of options into choices: path -> choice.

        Args:
            indices: one per site: the index among the choices of the site.
        """
        return {site.path: site.choices[i] for site, i in zip(self.sites, indices, strict=True)}

    def share(self, choices: Choices) -> float:
        """Return the cost of choices, as a share of the present cost.

        Args:
            choices: path -> choice.
        """
        return math.fsum(self.option(path, choice).cost for path, choice in choices.items()) / self.whole

    def predicted(self, choices: Choices) -> float:
        """Return the predicted error of the output with some choices, in the units of `Probe.error`.

        Args:
            choices: path -> choice.
        """
        return math.sqrt(math.fsum(self.option(path, choice).error for path, choice in choices.items()))

    def nearby(self, choices: Choices) -> tuple[float | None, float | None]:
        """Return the predicted errors with a tenth less and a tenth more of the cost of some choices.

        Args:
            choices: path -> choice.

        Returns:
            Both; None where no plan costs so little, and where that is more than the sites cost now.
        """
        budgets = (0.9 * self.share(choices), 1.1 * self.share(choices))
        less, more = (self.predicted(self.cheapest(each)) if self.least <= each <= 1 else None for each in budgets)
        return less, more

    def measure(self, budgets: Iterable[float | str]) -> list[tuple[float, float]]:
        """Measure the error of the output at some budgets: install the choices of each budget, and remove them again.

        Args:
            budgets: as `choose` takes them.

        Returns:
            (budget, error) for every budget.
        """
        if self.measured is None:
            raise ArgumentError("a plan that was loaded has measured nothing: compress with it, or make a new one")
        measured = self.measured
        with opened(measured.model, measured.layers.adapter, changes=True, of="layers") as layers:
            measured.check_model(layers)
            with progress_bar(list(budgets), desc="measuring budgets") as listed:
                found = [
                    (self.share_of(each), fitted_error(measured, fit_choices(measured, self.choose(each))))
                    for each in listed
                ]
            measured.kept.remove()
            return found

    def curve(self) -> list[tuple[float, float]]:
        """Return the predicted error by budget: (budget, error), from the smallest budget to 1."""
        budgets = torch.linspace(self.least, 1.0, POINTS, dtype=torch.float64).tolist()
        return [(budget, self.predicted(self.cheapest(min(budget, 1.0)))) for budget in budgets]

    def picture(self, measured: Sequence[tuple[float, float]] = ()) -> Figure:
        """Draw the curve of error against budget, with the points that `measure` returned, if any.

        Args:
            measured: (budget, error) of every point to draw beside the curve.
        """
        return budget_curve(self.curve(), measured, of=self.of)

    def to_dict(self) -> dict:
        """Return all numbers of the curve, ready for JSON."""
        return {"of": self.of, "shape": self.shape, "whole": self.whole, "least": self.least, "curve": self.curve()}

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON, for `load`, with its curve, for people; measurements are not among it.

        Args:
            path: the file.
        """
        every = [list(range(len(site.choices))) for site in self.sites]
        allowed = [
            [None if some == all_of else some for some, all_of in zip(each, every, strict=True)]
            for each in self.allowed
        ]
        sites = [site.to_dict() for site in self.sites]
        content = {"options": self.options.to_dict(), "shape": self.shape, "sites": sites, "allowed": allowed}
        said = {"version": VERSION, "seconds": self.seconds, "rest": self.rest}
        return write_document(path, said | content | {"curve": self.curve()})

    @classmethod
    def load(cls, path: str | Path) -> CompressionPlan:
        """Read a plan that `save` wrote. `compress(model, batches, budget, plan=...)` takes it.

        Args:
            path: the file.

        Raises:
            DataError: if it holds no such plan.
        """

        def build(stored: Any) -> CompressionPlan:
            sites = tuple(map(PlannedSite.from_dict, stored["sites"]))
            counts = [len(site.choices) for site in sites]
            allowed = [
                [list(range(count)) if some is None else some for count, some in zip(counts, each, strict=True)]
                for each in stored["allowed"]
            ]
            pairs = [pair for each in allowed for pair in zip(each, counts, strict=True)]
            are_valid = [bool(some) and all(is_index(i, count) for i in some) for some, count in pairs]
            expect(bool(pairs) and all(are_valid), "allowed", stored["allowed"], "indices of choices")
            paths = [site.path for site in sites]
            expect(len(set(paths)) == len(paths), "the paths", paths, "each site once")
            check_choice("shape", stored["shape"], MODEL_SHAPES)
            numbers = {name: stored[name] for name in ("seconds", "rest")}
            expect(all(map(is_amount, numbers.values())), "seconds and rest", numbers, "numbers, 0 or more")
            return cls(PlanOptions(**stored["options"]), stored["shape"], sites, allowed, **numbers)

        return read_document(path, VERSION, "plan of a compression", build)

    def check_sites(self, choosing: Choosing) -> None:
        """Raise ArgumentError unless a model has the sites of this plan, with its sizes and its choices.

        Args:
            choosing: the sites of the model that may change.
        """
        of_model = [(path, wholes_of(shape), tuple(choosing.choices[path])) for path, shape in choosing.shapes.items()]
        if of_model != [(site.path, site.whole, site.choices) for site in self.sites]:
            raise ArgumentError("the plan was made for another model, or the model was changed since: make a new one")

    def __str__(self) -> str:
        rows = []
        for budget in TABLE_BUDGETS:
            if budget >= self.least:
                choices = self.choose(budget)
                rows.append([f"{budget:.2f}", f"{self.predicted(choices):.4f}", *spread(self.sites, choices)])
        header = ["budget", "predicted error", *(part.heading for part in PARTS.values())]
        header += ["bits"] if self.options.has_bits else []
        last = f"budgets are shares of {for_people(self.whole)} {UNITS[self.of]}; the smallest is {self.least:.3f}"
        return text_table(header, rows, last)


def largest(near: float, fits: Callable[[float], bool]) -> float:
    """Return the largest number that fits, given a number that is off by rounding errors at most."""
    while fits(above := math.nextafter(near, math.inf)):
        near = above
    while not fits(near):
        near = math.nextafter(near, -math.inf)
    return near


def spread(sites: Iterable[PlannedSite], choices: Choices) -> list[str]:
    """Summarise what is left of each part, over all sites."""
    found = []
    for name, part in PARTS.items():
        wholes = {site.path: site.whole[name] for site in sites if name in site.whole}
        sizes = [whole if (size := choices[path].get(name)) is None else size for path, whole in wholes.items()]
        found.append(part.summary(sizes, list(wholes.values())) if sizes else "")
    numbers = {choices[site.path].bits or FLOAT for site in sites}
    return found + ([" ".join(map(str, sorted(numbers)))] if numbers != {FLOAT} else [])
