"""Heads as cells: one panel per role, a row per layer, a column per original number of a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from collab_heads.base.checks import did_you_mean
from collab_heads.errors import ArgumentError, NonFiniteError, ShapeError
from collab_heads.sites.site import ROLES, AttentionSite

Heads = Mapping[str, Sequence[int]]
Totals = Mapping[str, int] | int


@dataclass(frozen=True)
class Row:
    """The heads of a site, as a row of a panel.

    Attributes:
        site: the site.
        numbers: original numbers of the present heads, increasing.
        total: number of heads before any was removed.
    """

    site: AttentionSite
    numbers: tuple[int, ...]
    total: int

    @property
    def removed(self) -> list[int]:
        return [number for number in range(self.total) if number not in self.numbers]


@dataclass(frozen=True)
class Panel:
    """The sites of a role, in layer order."""

    role: str
    rows: tuple[Row, ...]

    @property
    def columns(self) -> int:
        """The largest number of heads that a site of the role had."""
        return max(row.total for row in self.rows)

    def cells(self) -> list[tuple[int, int, str, int]]:
        """Return (row, column, path, index among the present heads of the site) of every head."""
        numbered = enumerate(self.rows)
        return [(i, number, row.site.path, k) for i, row in numbered for k, number in enumerate(row.numbers)]

    def removed(self) -> list[tuple[int, int]]:
        """Return (row, column) of every removed head."""
        return [(i, number) for i, row in enumerate(self.rows) for number in row.removed]

    def groups(self) -> list[tuple[int, int, int]]:
        """Return (row, first column, last column) of the heads of every key head, in rows whose heads share them."""
        found = []
        for i, row in enumerate(self.rows):
            if row.site.groups is not None and row.site.shares_keys and row.numbers:
                of_keys: dict[int, list[int]] = {}
                for number, key in zip(row.numbers, row.site.groups, strict=True):
                    of_keys.setdefault(key, []).append(number)
                found += [(i, min(numbers), max(numbers)) for numbers in of_keys.values()]
        return found

    def grid(self, values: Mapping[str, Tensor]) -> np.ndarray:
        """Return the values as [rows, columns], NaN where there is no head."""
        grid = np.full((len(self.rows), self.columns), np.nan)
        for i, column, path, k in self.cells():
            grid[i, column] = float(values[path][k])
        return grid


def panels_of(
    sites: Sequence[AttentionSite], paths: Sequence[str], heads: Heads | None = None, totals: Totals | None = None
) -> list[Panel]:
    """Arrange the sites of some paths in panels.

    Args:
        sites: sites of the model.
        paths: the paths to show; a site that has lost all its heads (`heads[path] == ()`) is shown as well.
        heads: path -> original numbers of its present heads; None if no head was removed.
        totals: number of heads before any was removed, per path or for all. By default the highest number of the role's
            heads tells, if `heads` are given.
    """
    known = {site.path: site for site in sites}
    for path in (*paths, *(heads or ()), *(totals if isinstance(totals, Mapping) else ())):
        if path not in known:
            raise ArgumentError(f"{path!r} is none of the sites{did_you_mean(path, known)}")
    emptied = [path for path, numbers in (heads or {}).items() if not len(numbers)]
    shown = [site for site in known.values() if site.path in paths or site.path in emptied]
    if not shown:
        raise ArgumentError("there are no heads to show: pass the values of at least one site")
    numbers = {site.path: numbers_of(site, heads) for site in shown}
    panels = []
    for role in ROLES:
        of_role = sorted((site for site in shown if site.role == role), key=lambda site: site.layer)
        most = max((number + 1 for site in of_role for number in numbers[site.path]), default=0)
        rows = []
        for site in of_role:
            least = max(numbers[site.path], default=-1) + 1
            total = most if heads is not None else least
            if totals is not None:
                total = totals[site.path] if isinstance(totals, Mapping) and site.path in totals else total
                total = totals if isinstance(totals, int) else total
            if total < least:
                raise ArgumentError(
                    f"{site.path} had {total} heads in all, and its head {least - 1} is not one of them"
                )
            rows.append(Row(site, numbers[site.path], total))
        if any(row.total for row in rows):
            panels.append(Panel(role, tuple(rows)))
    if not panels:
        raise ArgumentError("every head was removed, and nothing says how many there were: pass totals=")
    return panels


def numbers_of(site: AttentionSite, heads: Heads | None) -> tuple[int, ...]:
    if heads is None or site.path not in heads:
        return tuple(range(site.num_heads))
    numbers = tuple(int(number) for number in heads[site.path])
    if len(numbers) not in (0, site.num_heads):
        raise ShapeError(f"{site.path} has {site.num_heads} heads, and heads= numbers {len(numbers)} of them")
    if list(numbers) != sorted(set(numbers)) or min(numbers, default=0) < 0:
        raise ArgumentError(f"{site.path}: numbers of heads must increase from 0 or more, not {numbers}")
    return numbers


def checked_values(
    sites: Sequence[AttentionSite], values: Mapping[str, Tensor | Sequence[float]], what: str, *, dimensions: int = 1
) -> dict[str, Tensor]:
    """Return the values of sites as float64 on the CPU: [H] or [H, H]."""
    known = {site.path: site for site in sites}
    checked = {}
    for path, given in values.items():
        if path not in known:
            raise ArgumentError(f"{what} of {path!r}, which is none of the sites{did_you_mean(path, known)}")
        tensor = torch.as_tensor(given).detach().to("cpu", torch.float64)
        wanted = (known[path].num_heads,) * dimensions
        if tuple(tensor.shape) != wanted:
            raise ShapeError(f"{what} of {path}: {tuple(tensor.shape)}, where its heads need {wanted}")
        if not tensor.isfinite().all():
            where = (~tensor.isfinite()).nonzero()[0].tolist()
            raise NonFiniteError(
                f"{what} of {path}, head {where[0]}: {float(tensor[tuple(where)])}; leave the site out"
            )
        checked[path] = tensor
    return checked
