"""Measures of heads over a training, such as confidence, open gates and alphas.

H is the number of heads of a site when the history begins. A head that has been removed since has no number: NaN, or
null in JSON.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collab_heads.base.checks import did_you_mean
from collab_heads.errors import ArgumentError, NonFiniteError, ShapeError
from collab_heads.files.atomic import write_file
from collab_heads.files.reading import built, read_document
from collab_heads.sites.site import AttentionSite

VERSION = 1
DIGITS = 6  # that are kept: a picture shows three
ALPHAS = "alphas"  # the one measure that is a matrix per site
GATES = "gates"  # P(open) of every gate


class Moment(NamedTuple):
    """A point of a run at which heads were measured.

    Attributes:
        step: optimizer steps of the run so far, over all its trainings.
        epoch: epoch of the training; 0 before the first step.
        stage: stage of the run, such as "fine-tuned".
    """

    step: int
    epoch: int
    stage: str


@dataclass(frozen=True, eq=False)
class HeadHistory:
    """Measures of heads at the recorded moments of a run.

    Attributes:
        sites: the sites that had heads when the history began, in model order.
        heads: path -> the original numbers of those heads.
        moments: the recorded moments, in order.
        values: measure -> path -> [moments, H], or [moments, H, H] for "alphas"; float64 on the CPU. NaN at moments
            without a number, and for heads that have been removed.

    Raises:
        ArgumentError: if there are no sites.
    """

    sites: tuple[AttentionSite, ...]
    heads: Mapping[str, tuple[int, ...]]
    moments: tuple[Moment, ...] = ()
    values: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self):
        if not self.sites:
            raise ArgumentError("a history of heads needs at least one site")

    def record(
        self,
        moment: Moment,
        values: Mapping[str, Mapping[str, Tensor | Sequence]],
        heads: Mapping[str, Sequence[int]] | None = None,
    ) -> "HeadHistory":
        """Return the history with one more moment; this one does not change.

        Args:
            moment: a moment that is not before the last one.
            values: measure -> path -> [H'], one number per head, or [H', H'] for "alphas".
            heads: path -> the original numbers of the H' present heads; None for those at the beginning.

        Raises:
            ArgumentError: if the moment is none, or before the last one, a path or a head was not there at the
                beginning, or one of "gates" is not a probability.
            ShapeError: if there is not one number per head.
            NonFiniteError: if one is NaN or infinite.
        """
        if not isinstance(moment, Moment) or not isinstance(moment.step, int):
            raise ArgumentError(f"moment must be a Moment(step, epoch, stage), not {moment!r:.80}")
        if self.moments and moment.step < self.moments[-1].step:
            raise ArgumentError(f"step {moment.step} comes after step {self.moments[-1].step}: a history goes forward")
        heads = self.heads if heads is None else heads
        longer = {measure: dict(of_measure) for measure, of_measure in self.values.items()}
        for measure in dict.fromkeys([*self.values, *values]):
            for path in dict.fromkeys([*self.values.get(measure, {}), *values.get(measure, {})]):
                before = longer.setdefault(measure, {}).get(path)
                row = self.row(measure, path, values.get(measure, {}).get(path), heads)
                if before is None:
                    before = torch.full((len(self.moments), *row.shape), math.nan, dtype=torch.float64)
                longer[measure][path] = torch.cat([before, row[None]])
        return dataclasses.replace(self, moments=(*self.moments, moment), values=longer)

    def row(
        self, measure: str, path: str, given: Tensor | Sequence | None, heads: Mapping[str, Sequence[int]]
    ) -> Tensor:
        """Return the numbers at the places of the heads of the beginning, [H] or [H, H]; NaN for removed heads."""
        if path not in self.heads:
            raise ArgumentError(f"{measure} of {path!r}, which is none of the sites{did_you_mean(path, self.heads)}")
        numbers, dimensions = self.heads[path], 2 if measure == ALPHAS else 1
        row = torch.full((len(numbers),) * dimensions, math.nan, dtype=torch.float64)
        if given is None:
            return row
        now, values = heads.get(path, ()), torch.as_tensor(given).detach().to("cpu", torch.float64)
        if tuple(values.shape) != (len(now),) * dimensions:
            raise ShapeError(f"{measure} of {path}: {tuple(values.shape)} numbers for {len(now)} heads")
        if not values.isfinite().all():
            raise NonFiniteError(f"{measure} of {path}: a number is NaN or infinite")
        if measure == GATES and len(wrong := values[(values < 0) | (values > 1)]):
            raise ArgumentError(f"{measure} of {path}: {float(wrong[0]):g} is not a probability")
        if unknown := [head for head in now if head not in numbers]:
            raise ArgumentError(f"{path} had no head {unknown[0]} when the history began")
        places = torch.tensor([numbers.index(head) for head in now], dtype=torch.long)
        row[torch.meshgrid(*[places] * dimensions, indexing="ij")] = rounded(values)
        return row

    def where(self, measure: str) -> list[int]:
        """Return the indices of the moments at which a measure was recorded."""
        rows = self.values.get(measure, {}).values()
        return [i for i in range(len(self.moments)) if any(row[i].isfinite().any() for row in rows)]

    def to_dict(self) -> dict[str, Any]:
        """Return the history ready for JSON; numbers have six digits, and null stands for none."""
        return {
            "version": VERSION,
            "sites": [site.to_dict() for site in self.sites],
            "heads": {path: list(numbers) for path, numbers in self.heads.items()},
            "moments": [list(moment) for moment in self.moments],
            "values": {
                measure: {path: without_nan(rows.tolist()) for path, rows in of_measure.items()}
                for measure, of_measure in self.values.items()
            },
        }

    @classmethod
    def from_dict(cls, stored: Any) -> "HeadHistory":
        """Return the history that `to_dict` described.

        Raises:
            DataError: if the object is something else, or of another version.
        """
        return built(stored, VERSION, "this is not a history of heads", cls._from_dict)

    @classmethod
    def _from_dict(cls, stored: Any) -> "HeadHistory":
        sites = tuple(AttentionSite.from_dict(site) for site in stored["sites"])
        heads = {path: tuple(map(int, numbers)) for path, numbers in stored["heads"].items()}
        moments = tuple(Moment(int(step), int(epoch), str(stage)) for step, epoch, stage in stored["moments"])
        values = {
            measure: {
                path: torch.tensor(with_nan(rows), dtype=torch.float64).reshape(
                    len(moments), *(len(heads[path]),) * (2 if measure == ALPHAS else 1)
                )
                for path, rows in of_measure.items()
            }
            for measure, of_measure in stored["values"].items()
        }
        for path, rows in values.get(GATES, {}).items():
            if len(wrong := rows[(rows < 0) | (rows > 1)]):
                raise ValueError(f"{GATES} of {path}: {float(wrong[0]):g} is not a probability")
        return cls(sites, heads, moments, values)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":")) + "\n"

    def save(self, path: str | Path) -> None:
        """Write a JSON file; it replaces an existing one only when complete."""
        write_file(path, self.to_json().encode())

    @classmethod
    def load(cls, path: str | Path) -> "HeadHistory":
        """Read a file that `save`, or a run with `--analyze_every`, wrote.

        Raises:
            DataError: if the file is missing, damaged or of another version.
        """
        return read_document(path, VERSION, "history of heads", cls._from_dict)


def rounded(values: Tensor) -> Tensor:
    """Round to the digits that JSON keeps, so that a stored history is read back unchanged."""
    flat = [float(f"{value:.{DIGITS}g}") for value in values.flatten().tolist()]
    return torch.tensor(flat, dtype=torch.float64).reshape(values.shape)


def without_nan(rows: Any) -> Any:
    if isinstance(rows, list):
        return [without_nan(each) for each in rows]
    return None if math.isnan(rows) else rows


def with_nan(rows: Any) -> Any:
    if isinstance(rows, list):
        return [with_nan(each) for each in rows]
    return math.nan if rows is None else rows
