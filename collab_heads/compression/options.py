"""The options that `plan` and `compress` share."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, fields

from collab_heads.base.checks import MAX_SIZE, check_choice, check_count
from collab_heads.base.option_values import MEASURES, MODEL_SHAPES, SITE_PARTS, Measure, ModelShape, SitePart
from collab_heads.collaborative.fit import FitOptions
from collab_heads.collaborative.kinds import check_kind
from collab_heads.compression.parts.shape import AttentionShape
from collab_heads.compression.parts.table import PARTS
from collab_heads.errors import ArgumentError
from collab_heads.sites.state import QueryKeyKind


@dataclass(frozen=True)
class PlanOptions:
    """The options of a plan; `plan` explains them.

    Raises:
        ArgumentError: on an unknown measure, part, kind or shape, or an impossible number.
    """

    of: Measure = "parameters"
    sites: str | Iterable[str] | None = None
    parts: SitePart | Iterable[SitePart] = SITE_PARTS
    kind: QueryKeyKind = "per_head"
    shape: ModelShape | None = None
    multiple_of: int = 1
    refine_steps: int = 120
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("measure", self.of, MEASURES)
        for name in self.named_parts:
            check_choice("part", name, PARTS)
        if not self.named_parts:
            raise ArgumentError(f"parts is empty: name some of {', '.join(PARTS)}")
        check_kind(self.kind)
        check_count("multiple_of", self.multiple_of, 1, MAX_SIZE)
        if self.shape is not None:
            check_choice("shape", self.shape, MODEL_SHAPES)
        _ = self.fit

    @functools.cached_property
    def named_parts(self) -> tuple[SitePart, ...]:
        return (self.parts,) if isinstance(self.parts, str) else tuple(self.parts)

    @property
    def counted_parts(self) -> tuple[SitePart, ...]:
        """The parts that count in the measure: feed-forward blocks have no cache."""
        of_attention = tuple(name for name in self.named_parts if PARTS[name].shape is AttentionShape)
        return of_attention or self.named_parts if self.of == "cache" else self.named_parts

    @property
    def fit(self) -> FitOptions:
        """How queries and keys are fitted."""
        return FitOptions(refine_steps=self.refine_steps, seed=self.seed)

    def changed(self) -> list[str]:
        """Return the names of the options that differ from the default."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]
