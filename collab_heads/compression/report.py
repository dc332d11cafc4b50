"""The report of a compression, per site: a table to read (`str`) and numbers to store (`to_dict`)."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from collab_heads.base.display import text_table
from collab_heads.base.option_values import SitePart
from collab_heads.compression.measures import UNITS, Measure
from collab_heads.compression.parts.table import PARTS
from collab_heads.sites.site import Role
from collab_heads.sites.state import QueryKeyKind

SURPRISE = 2  # times the predicted error: a note tells the reader if the measured error exceeds this
LATE = 1.1  # times the budget of time: a note tells the reader if attention takes longer


@dataclass(frozen=True)
class CompressedSite:
    """The report of one site.

    Attributes:
        path, role: the path and the role of the site.
        kind: the kind of its query/key projection after the compression; None for the stock projection.
        sizes: part -> its size before and after: the number of "heads", the width of the "query_key" projection over
            all heads, and that of the "values" over all value heads.
        parameters_before, parameters_after: parameters of its four projections.
        cache_before, cache_after: elements cached per token.
        predicted_error: the predicted error of the model's output if only this site had changed.
    """

    path: str
    role: Role
    kind: QueryKeyKind | None
    sizes: Mapping[SitePart, tuple[int, int]]
    parameters_before: int
    parameters_after: int
    cache_before: int
    cache_after: int
    predicted_error: float

    def to_dict(self) -> dict:
        """Return all numbers, ready for JSON; sizes as `heads_before`, `heads_after` and so on."""
        entries = dataclasses.asdict(self)
        for name, (before, after) in entries.pop("sizes").items():
            field = PARTS[name].field
            entries |= {f"{field}_before": before, f"{field}_after": after}
        return entries


@dataclass(frozen=True)
class Cost:
    """The cost of attention by one measure, before and after."""

    before: float
    after: float

    @property
    def share(self) -> float:
        """Return the share of the cost that is left."""
        return self.after / self.before


@dataclass(frozen=True)
class CompressReport:
    """The report of `compress`.

    Attributes:
        sites: one report per site that could change, in model order.
        of: the measure of the budget.
        budget: the requested share of that measure; None if `max_error` was given.
        max_error: the requested bound on the error of the output; None if a budget was used.
        predicted_error: the predicted error of the model's output.
        measured_error: the error on calibration examples that no fit has seen. For numbers and states this is the root
            mean square of the change, relative to their standard deviation; for distributions, the root of twice the
            mean Kullback-Leibler divergence.
        costs: measure -> the cost of the attention that could change. "time" is not taken from the plan: changed sites
            are timed again, in turns with the original ones.
        model_parameters_before, model_parameters_after: parameters of the whole model.
        seconds: total time, including that of the plan if `compress` was given one.
    """

    sites: tuple[CompressedSite, ...]
    of: Measure
    budget: float | None
    max_error: float | None
    predicted_error: float
    measured_error: float
    costs: dict[Measure, Cost]
    model_parameters_before: int
    model_parameters_after: int
    seconds: float

    def to_dict(self) -> dict:
        """Return all numbers, ready for JSON."""
        return dataclasses.asdict(self) | {"sites": [site.to_dict() for site in self.sites]}

    def __str__(self) -> str:
        columns = [part.column for part in PARTS.values()]
        header = ["site", "role", *columns, "parameters", "cache/token", "adds to error"]
        costs = "\n".join(
            f"{UNITS[measure]}: {cost.before:,.6g} -> {cost.after:,.6g} ({cost.share:.1%})"
            for measure, cost in self.costs.items()
        )
        before, after = self.model_parameters_before, self.model_parameters_after
        last = (
            f"{costs}\nmodel parameters: {before:,} -> {after:,} ({after / before - 1:+.1%}), {self.seconds:.1f} s\n"
            f"error of the output: predicted {self.predicted_error:.4f}, measured {self.measured_error:.4f}"
        )
        return "\n".join([text_table(header, [table_row(site) for site in self.sites], last), *self.notes()])

    def notes(self) -> list[str]:
        """Return notes for the reader: where the result misses the plan."""
        notes = []
        if self.of == "time" and self.budget is not None and self.costs["time"].share > LATE * self.budget:
            notes.append(
                f"note: attention takes {self.costs['time'].share:.1%} of the time that it took, timed again in turns "
                f"with the original, and {self.budget:.1%} was asked for: times say little where other programs run, "
                "or where a batch is small; try a larger first batch on a quiet machine, or a budget of operations"
            )
        if self.measured_error <= SURPRISE * self.predicted_error:
            return notes
        times = self.measured_error / self.predicted_error if self.predicted_error else float("inf")
        return [
            *notes,
            f"note: the measured error is {times:.1f} times the predicted one: so few calibration examples say little "
            "about others; pass more, at best 128 to 512 sentences",
        ]


def table_row(site: CompressedSite) -> tuple[str, ...]:
    return (
        site.path,
        site.role,
        *(PARTS[name].cell(*sizes, site.kind) for name, sizes in site.sizes.items()),
        f"{site.parameters_before:,} -> {site.parameters_after:,}",
        f"{site.cache_before} -> {site.cache_after}",
        f"{site.predicted_error:.4f}",
    )
