"""The options that `plan` and `compress` share."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import cast

from collab_heads.base.checks import MAX_SIZE, check_choice, check_count
from collab_heads.base.option_values import (
    BITS,
    ENGINE_WORDS,
    MEASURES,
    MODEL_SHAPES,
    REFINE_STEPS,
    SITE_PARTS,
    Engine,
    Measure,
    ModelShape,
    SitePart,
)
from collab_heads.compression.parts.shape import AttentionShape
from collab_heads.compression.parts.table import PARTS
from collab_heads.errors import ArgumentError
from collab_heads.fitting.fit import FitOptions
from collab_heads.fitting.kinds import check_kind
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
    refine_steps: int = REFINE_STEPS
    seed: int = 0
    bits: int | Iterable[int] | None = None
    table_bits: int | Iterable[int] | None = None
    engine: Engine = "torch"

    def __post_init__(self) -> None:
        if isinstance(self.sites, Iterable) and not isinstance(self.sites, str):  # others are refused with the names
            object.__setattr__(self, "sites", tuple(self.sites))
        object.__setattr__(self, "parts", (self.parts,) if isinstance(self.parts, str) else tuple(self.parts))
        check_choice("measure", self.of, MEASURES)
        for name in self.parts:
            check_choice("part", name, PARTS)
        object.__setattr__(self, "bits", checked_bits("bits", self.bits))
        inherited = () if self.of == "time" else self.bits
        table_bits = inherited if self.table_bits is None else checked_bits("table_bits", self.table_bits)
        object.__setattr__(self, "table_bits", table_bits)
        if not (self.parts or self.has_bits):
            raise ArgumentError(f"parts is empty: name some of {', '.join(PARTS)}, or give bits")
        check_kind(self.kind)
        check_count("multiple_of", self.multiple_of, 1, MAX_SIZE)
        if self.has_bits and self.of == "parameters":
            object.__setattr__(self, "of", "bytes")
        self.check_bits()
        if self.shape is not None:
            check_choice("shape", self.shape, MODEL_SHAPES)
        _ = self.fit

    def check_bits(self) -> None:
        """Raise ArgumentError if few bits do not save what is counted, or an engine is named where none runs."""
        check_choice("engine", self.engine, ENGINE_WORDS)
        if self.engine != "torch" and self.of != "time":
            raise ArgumentError(f"engine={self.engine!r}, of={self.of!r}: only time is measured there: use of='time'")
        if self.table_bits and self.of == "time":
            raise ArgumentError(
                f"table_bits={self.table_bits}, of='time': to look up a table takes no time: compress a second time, "
                "with a size as the budget, parts=() and table_bits"
            )
        given = f"bits={self.bits}" if self.bits else f"table_bits={self.table_bits}"
        if self.has_bits and self.of not in ("bytes", "time"):
            raise ArgumentError(f"{given}, of={self.of!r}: few bits save bytes, and time in engines: use of='bytes'")
        if self.has_bits and self.of == "time" and self.engine == "torch":
            others = " or ".join(f"engine={name!r}" for name in ENGINE_WORDS if name != "torch")
            raise ArgumentError(f"{given}: PyTorch multiplies in float, so few bits save no time there: use {others}")

    @property
    def counted_parts(self) -> tuple[SitePart, ...]:
        """The parts that count in the measure: feed-forward blocks have no cache."""
        parts = cast(tuple[SitePart, ...], self.parts)
        of_attention = tuple(name for name in parts if PARTS[name].shape is AttentionShape)
        return of_attention or parts if self.of == "cache" else parts

    @property
    def grid_bits(self) -> tuple[int, ...]:
        """The bits that weights of layers may have on a grid, most first."""
        return cast(tuple[int, ...], self.bits)

    @property
    def grid_table_bits(self) -> tuple[int, ...]:
        """The same of tables."""
        return cast(tuple[int, ...], self.table_bits)

    @property
    def has_bits(self) -> bool:
        """Whether any weight may have few bits."""
        return bool(self.bits or self.table_bits)

    @property
    def fit(self) -> FitOptions:
        """The options of the fits of queries and keys."""
        return FitOptions(refine_steps=self.refine_steps, seed=self.seed)

    def to_dict(self) -> dict:
        """Return the options, ready for JSON."""
        return asdict(self)

    def changed(self) -> list[str]:
        """Return the names of the options that differ from the default."""
        default = PlanOptions()
        return [field.name for field in fields(self) if getattr(self, field.name) != getattr(default, field.name)]


def checked_bits(name: str, bits: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return the bits that weights may have on a grid, most first; none for None.

    Args:
        name: of the option.
        bits: its value.

    Raises:
        ArgumentError: on bits that no grid has.
    """
    listed = [] if bits is None else [*bits] if isinstance(bits, Iterable) else [bits]
    if not all(isinstance(each, int) and each in BITS for each in listed):
        raise ArgumentError(f"{name}={bits!r}: give some of {', '.join(map(str, BITS))}, or None")
    return tuple(sorted(set(listed), reverse=True))
