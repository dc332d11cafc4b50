"""What a compression did, per site: for people (`str`) and for machines (`to_dict`)."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from collab_heads.base.display import text_table
from collab_heads.base.option_values import SitePart
from collab_heads.compression.measures import UNITS, Measure
from collab_heads.compression.parts.table import PARTS
from collab_heads.sites.site import Role
from collab_heads.sites.state import QueryKeyKind

SURPRISE = 2  # times the predicted error that a measured one may be, before the reader is told
LATE = 1.1  # times the budget of time that attention may take, before the reader is told


@dataclass(frozen=True)
class CompressedSite:
    """What became of one site.

    Attributes:
        path, role: the site.
        kind: of the query/key projection that it has now; None for the stock one.
        sizes: part -> its size before and after: the number of "heads", the width of the "query_key" projection over
            all heads, that of the "values" over all heads.
        parameters_before, parameters_after: of its four projections.
        cache_before, cache_after: elements cached per token.
        predicted_error: what it was expected to add to the error of the output, as if it alone had changed.
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
        """All numbers, ready for JSON; sizes as `heads_before`, `heads_after` and so on."""
        entries = dataclasses.asdict(self)
        for name, (before, after) in entries.pop("sizes").items():
            field = PARTS[name].field
            entries |= {f"{field}_before": before, f"{field}_after": after}
        return entries


@dataclass(frozen=True)
class Cost:
    """What attention costs by one measure, before and after."""

    before: float
    after: float

    @property
    def share(self) -> float:
        """What is left."""
        return self.after / self.before


@dataclass(frozen=True)
class CompressReport:
    """What `compress` did.

    Attributes:
        sites: one per site that could change, in model order.
        of: what the budget was of.
        budget: the share of it that was asked for; None if an error was.
        max_error: the error of the output that was asked for; None if a budget was.
        predicted_error: the error of the model's output that was expected.
        measured_error: the error on calibration examples that no fit has seen. For numbers and states the root mean
            square of the change, as a share of how they vary; for distributions the root of twice the mean
            Kullback-Leibler divergence.
        costs: measure -> what the attention that could change costs. "time" is not the plan's: sites that changed were
            timed again, in turns with the original.
        model_parameters_before, model_parameters_after: of the whole model.
        seconds: in all, those of a plan that was handed over included.
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
        """All numbers, ready for JSON."""
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
        """What a reader should know: a plan that did not hold."""
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
    """The cells of one site."""
    return (
        site.path,
        site.role,
        *(PARTS[name].cell(*sizes, site.kind) for name, sizes in site.sizes.items()),
        f"{site.parameters_before:,} -> {site.parameters_after:,}",
        f"{site.cache_before} -> {site.cache_after}",
        f"{site.predicted_error:.4f}",
    )
