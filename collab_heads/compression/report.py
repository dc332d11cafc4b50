"""The report of a compression, per site: a table to read (`str`) and numbers to store (`to_dict`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from collab_heads.base.option_values import FeedForwardRole, SitePart, TableRole
from collab_heads.base.report import (
    SAME_TEXTS,
    Cell,
    Report,
    cache_column,
    for_people,
    loss_in_words,
    of_fields,
    table_of,
)
from collab_heads.compression.measures import UNITS, Measure
from collab_heads.compression.parts.table import PARTS
from collab_heads.model.site_size import FLOAT
from collab_heads.sites.site import Role
from collab_heads.sites.state import QueryKeyKind

SURPRISE = 2  # times the predicted error: a note tells the reader if the measured error exceeds this
FAR = 1.5  # times the error on examples like the batches: a note tells the reader if that of validation exceeds this
LATE = 1.1  # times the budget of time: a note tells the reader if attention takes longer


@dataclass(frozen=True)
class CompressedSite:
    """The report of one site.

    Attributes:
        path, role: the path and the role of the site.
        kind: the kind of its query/key projection after the compression; None for the stock projection, and for a
            feed-forward block.
        sizes: part -> its size before and after. Of attention: the number of "heads", the width of the "query_key"
            projection over all heads, and that of the "values" over all value heads. Of a feed-forward block: the
            number of "neurons".
        parameters_before, parameters_after: parameters of its projections.
        cache_before, cache_after: elements cached per token; 0 in encoders.
        predicted_error: the predicted error of the model's output if only this site had changed.
        bits_before, bits_after: the bits of a weight.
    """

    path: str
    role: Role | FeedForwardRole | TableRole
    kind: QueryKeyKind | None
    sizes: Mapping[SitePart, tuple[int, int]]
    parameters_before: int
    parameters_after: int
    cache_before: int
    cache_after: int
    predicted_error: float
    bits_before: int = FLOAT
    bits_after: int = FLOAT

    def to_dict(self) -> dict:
        """Return all numbers, ready for JSON; sizes as `heads_before`, `heads_after` and so on."""
        entries = of_fields(self)
        for name, (before, after) in entries.pop("sizes").items():
            field = PARTS[name].field
            entries |= {f"{field}_before": before, f"{field}_after": after}
        return entries


@dataclass(frozen=True)
class Cost:
    """The cost of the sites that could change by one measure, before and after."""

    before: float
    after: float

    @property
    def share(self) -> float:
        """Return the share of the cost that is left."""
        return self.after / self.before


@dataclass(frozen=True)
class CompressReport(Report):
    """The report of `compress`.

    Attributes:
        sites: one report per site that could change, in model order.
        of: the measure of the budget.
        budget: the requested share of that measure; None if none was.
        max_error: the requested bound on the error of the output; None if none was.
        scores: the scores of the model before and after, by `evaluate`; None without it.
        predicted_error: the predicted error of the model's output.
        measured_error: the error on calibration examples that no fit has seen. For numbers and states this is the root
            mean square of the change, relative to their standard deviation; for distributions, the root of twice the
            mean Kullback-Leibler divergence.
        validation_error: the same on the examples of `validation`; None without them.
        nearby_errors: the predicted errors with a tenth less and a tenth more of what the sites cost now; None where
            that cannot be.
        costs: measure -> the cost of the sites that could change. "time" is not taken from the plan: changed sites
            are timed again, in turns with the original ones.
        model_parameters_before, model_parameters_after: parameters of the whole model, embeddings included.
        model_bytes_before, model_bytes_after: the bytes that they take in a checkpoint.
        operations_share: the share of the model's multiplications on the batches that is left: of all projections,
            output layer included, and of attention. On batches this is about its share of the time.
        seconds: total time, including that of the plan if `compress` was given one.
    """

    sites: tuple[CompressedSite, ...]
    of: Measure
    budget: float | None
    max_error: float | None
    scores: tuple[float, float] | None
    predicted_error: float
    measured_error: float
    validation_error: float | None
    nearby_errors: tuple[float | None, float | None]
    costs: dict[Measure, Cost]
    model_parameters_before: int
    model_parameters_after: int
    model_bytes_before: int
    model_bytes_after: int
    operations_share: float
    seconds: float

    def lines(self) -> list[str]:
        parameters = f"{self.model_parameters_before:,} -> {self.model_parameters_after:,} parameters"
        share = self.model_parameters_after / self.model_parameters_before - 1
        before, after = (f"{size / 1e6:,.1f}" for size in (self.model_bytes_before, self.model_bytes_after))
        first = (
            f"model: {parameters} ({share:+.1%}), {before} -> {after} MB, {self.operations_share:.1%} of its "
            f"multiplications; {self.seconds:.1f} s"
        )
        shown = [each for each in self.costs if each != "cache" or cache_column(self.sites)]
        costs = [
            f"{UNITS[measure]}: {for_people(cost.before)} -> {for_people(cost.after)} ({cost.share:.1%})"
            for measure, cost in self.costs.items()
            if measure in (self.of, *shown)
        ]
        error = f"error of the output: predicted {self.predicted_error:.4f}, measured {self.measured_error:.4f}"
        if self.validation_error is not None:
            error += f", on the examples of validation {self.validation_error:.4f}"
        if self.scores is not None:
            error += f"; score {self.scores[0]:.6g} -> {self.scores[1]:.6g}"
        error += f" ({SAME_TEXTS})"
        errors = zip(("less", "more"), self.nearby_errors, strict=True)
        nearby = [f"{error:.4f} with a tenth {which}" for which, error in errors if error is not None]
        margin = [f"predicted error by {UNITS[self.of]}: {', '.join(nearby)}"] if nearby else []
        alike: dict[tuple[SitePart, ...], list[CompressedSite]] = {}
        for site in self.sites:
            alike.setdefault(tuple(site.sizes), []).append(site)
        tables = [table_of(columns_of(sites), sites) for sites in alike.values()]
        return [first, *costs, error, *margin, *tables, *self.remarks()]

    def remarks(self) -> list[str]:
        notes = []
        if self.of == "time" and self.budget is not None and self.costs["time"].share > LATE * self.budget:
            notes.append(
                f"note: the layers take {self.costs['time'].share:.1%} of the time that it took, timed again in turns "
                f"with the original, and {self.budget:.1%} was asked for: times say little where other programs run, "
                "or where a batch is small; try a larger first batch on a quiet machine, or a budget of operations"
            )
        notes.append(loss_in_words(self.measured_error**2))
        if self.validation_error is not None and self.validation_error > FAR * self.measured_error:
            times = self.validation_error / self.measured_error if self.measured_error else float("inf")
            notes.append(
                f"note: on the examples of validation the output moves {times:.1f} times as far as on examples like "
                "the batches: add texts like them to the batches, or keep more"
            )
        if self.measured_error <= SURPRISE * self.predicted_error:
            return notes
        times = self.measured_error / self.predicted_error if self.predicted_error else float("inf")
        return [
            *notes,
            f"note: the measured error is {times:.1f} times the predicted one: so few calibration examples say little "
            "about others; pass more, at best 256 to 2,048 sentences",
        ]


def columns_of(sites: Sequence[CompressedSite]) -> dict[str, Cell]:
    has_bits = any(site.bits_after != site.bits_before for site in sites)
    return {
        "site": "{.path}",
        "role": "{.role}",
        **{PARTS[name].column: partial(cell_of, name) for name in sites[0].sizes},
        "parameters": "{0.parameters_before:,} -> {0.parameters_after:,}",
        **({"bits": "{0.bits_before} -> {0.bits_after}"} if has_bits else {}),
        **cache_column(sites),
        "adds to error": "{.predicted_error:.4f}",
    }


def cell_of(name: SitePart, site: CompressedSite) -> str:
    return PARTS[name].cell(*site.sizes[name], site.kind)
