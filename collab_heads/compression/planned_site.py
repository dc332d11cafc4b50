"""A site in a plan: its choices, with what each costs and what each does to the output."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from collab_heads.base.checks import is_count, is_index, is_number
from collab_heads.base.option_values import BITS, FeedForwardRole, SitePart, TableRole
from collab_heads.compression.parts.shape import UNCHANGED, Choice
from collab_heads.compression.parts.table import PARTS
from collab_heads.compression.spending import Option
from collab_heads.sites.site import Role
from collab_heads.sites.state import expect

AMOUNTS = "a number of 0 or more for every choice"


@dataclass(frozen=True)
class PlannedSite:
    """The choices of a site, with what each costs.

    Attributes:
        path, role: the path and the role of the site.
        whole: part -> the size that it has.
        choices: all choices; the site as it is comes last.
        costs: of every choice, in the units of the plan's measure.
        errors: of every choice, what it adds to the squared error of the output.
    """

    path: str
    role: Role | FeedForwardRole | TableRole
    whole: Mapping[SitePart, int]
    choices: tuple[Choice, ...]
    costs: tuple[float, ...]
    errors: tuple[float, ...]

    @property
    def options(self) -> list[Option]:
        return [Option(*each) for each in zip(self.costs, self.errors, strict=True)]

    @functools.cached_property
    def by_choice(self) -> dict[Choice, Option]:
        """Choice -> what it costs."""
        return dict(zip(self.choices, self.options, strict=True))

    def to_dict(self) -> dict:
        sizes = [[choice.get(part) for part in self.whole] for choice in self.choices]
        bits = [choice.bits for choice in self.choices]
        return asdict(self) | {"whole": dict(self.whole), "choices": sizes, "bits": bits}

    @classmethod
    def from_dict(cls, stored: Mapping) -> PlannedSite:
        """Return the site that `to_dict` described.

        Raises:
            ValueError: if a number is not one that a plan has; other errors on what is described otherwise.
        """
        path, whole = stored["path"], dict(stored["whole"])
        expect(set(whole) <= set(PARTS) and all(map(is_count, whole.values())), f"whole of {path}", whole, "sizes")
        for sizes in stored["choices"]:
            fit = [size is None or is_index(size, most) for size, most in zip(sizes, whole.values(), strict=True)]
            expect(all(fit), f"a choice of {path}", sizes, f"sizes below {whole}, or null")
        on_grids = stored["bits"]
        expect(all(bits is None or is_grid(bits) for bits in on_grids), f"bits of {path}", on_grids, f"some of {BITS}")
        choices = tuple(
            Choice.of(bits, **dict(zip(whole, sizes, strict=True)))
            for sizes, bits in zip(stored["choices"], on_grids, strict=True)
        )
        expect(choices[-1] == UNCHANGED, f"the last choice of {path}", choices[-1], "the site as it is")
        for name in ("costs", "errors"):
            numbers = stored[name]
            expect(len(numbers) == len(choices) and all(map(is_amount, numbers)), f"{name} of {path}", numbers, AMOUNTS)
        return cls(path, stored["role"], whole, choices, tuple(stored["costs"]), tuple(stored["errors"]))


def is_grid(value: object) -> bool:
    """Return True for bits that a grid has."""
    return is_count(value) and value in BITS


def is_amount(value: object) -> bool:
    """Return True for a finite number of 0 or more."""
    return is_number(value) and value >= 0
