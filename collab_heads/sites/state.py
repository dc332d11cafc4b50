"""The state of a site and of its parts, of which the record of a model consists (`record`)."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from collab_heads.base.checks import MAX_SIZE, is_index, is_number, is_size
from collab_heads.base.option_values import FEED_FORWARD_ROLES, ROLES, FeedForwardRole, Role
from collab_heads.errors import ConfigError

MAX_SCALE = 1e6  # scores are scaled by 1 or less; anything near this is a damaged file
GATE_RANGE = (1e-6, 1e3)  # of temperatures, and of what a stretch adds to [0, 1]; beyond it float32 loses the gates
SIZE = f"a positive integer of at most {MAX_SIZE}"

QueryKeyKind = Literal["shared", "per_head", "rotary"]
KINDS: tuple[QueryKeyKind, ...] = get_args(QueryKeyKind)
DIVIDED: frozenset[QueryKeyKind] = frozenset({"per_head", "rotary"})  # kinds whose heads have R / H dimensions each
MixingInit = Literal["concatenate", "ones", "normal", "xavier"]
MIXING_INITS: tuple[MixingInit, ...] = get_args(MixingInit)
GateKind = Literal["learned", "subset", "fixed"]
GATE_KINDS: tuple[GateKind, ...] = get_args(GateKind)


@dataclass(frozen=True)
class QueryKeyState:
    """The state of the query/key projection of a site.

    Attributes:
        kind: "shared" (full mixing), "per_head" (narrower ordinary heads) or "rotary" (ordinary heads with rotary
            positions).
        dim: R, the width over all heads.
        dim_head: d_k, the width of a query/key head of the original module; at R = H * d_k the swap is exact.
        scale: factor of the dot product, that of the original module.
        bias: whether the original query had a bias.
        mixing_init: the initial mixing for training from scratch: "concatenate" (0/1 blocks), "ones", "normal" or
            "xavier".
        groups: the key/value head of every head, where heads share them; None where each has its own.
    """

    kind: QueryKeyKind
    dim: int
    dim_head: int
    scale: float
    bias: bool
    mixing_init: MixingInit = "concatenate"
    groups: tuple[int, ...] | None = None

    def __post_init__(self):
        expect(self.kind in KINDS, "query_key.kind", self.kind, f"one of {', '.join(KINDS)}")
        expect(is_size(self.dim), "query_key.dim", self.dim, SIZE)
        expect(is_size(self.dim_head), "query_key.dim_head", self.dim_head, SIZE)
        valid_scale = isinstance(self.scale, int | float) and 0 < self.scale <= MAX_SCALE
        expect(valid_scale and not isinstance(self.scale, bool), "query_key.scale", self.scale, "a positive number")
        expect(isinstance(self.bias, bool), "query_key.bias", self.bias, "true or false")
        wanted = f"one of {', '.join(MIXING_INITS)}"
        expect(self.mixing_init in MIXING_INITS, "query_key.mixing_init", self.mixing_init, wanted)
        if self.groups is not None:
            numbers = isinstance(self.groups, Sequence) and all(type(key) is int for key in self.groups)
            steps = [after - key for key, after in zip(self.groups, self.groups[1:], strict=False)] if numbers else []
            valid = numbers and list(self.groups[:1]) == [0] and set(steps) <= {0, 1}
            wanted = "the key/value head of every head: from 0 on, ascending, none left out"
            expect(valid, "query_key.groups", self.groups, wanted)
            object.__setattr__(self, "groups", tuple(self.groups))  # JSON has lists

    def holds(self, kind: QueryKeyKind, num_heads: int) -> bool:
        """Return True if the kind and the full width of the projection let it hold stock weights unchanged."""
        return self.kind == kind and self.dim == num_heads * self.dim_head


@dataclass(frozen=True)
class ValueState:
    """The state of the narrower values of a site.

    Such a site also has one of our query/key projections, since stock forwards know only one width.

    Attributes:
        dim: width of a value head, the same for every head of the site.
        dim_head: d_v, the width of a value head of the original module.
    """

    dim: int
    dim_head: int

    def __post_init__(self):
        expect(is_size(self.dim_head), "values.dim_head", self.dim_head, SIZE)
        valid = is_size(self.dim) and self.dim <= self.dim_head
        expect(valid, "values.dim", self.dim, f"a positive integer of at most {self.dim_head}")


@dataclass(frozen=True)
class GateState:
    """The state of the gates on the heads of a site.

    Attributes:
        kind: "learned" (Hard Concrete), "subset" (learned, with an exact number of open heads in every step) or
            "fixed".
        temperature: of the Hard Concrete samples.
        stretch: (gamma, zeta), the interval to which samples are stretched before they are clipped to [0, 1].
    """

    kind: GateKind = "learned"
    temperature: float = 0.33
    stretch: tuple[float, float] = (-0.1, 1.1)

    @property
    def is_learned(self) -> bool:
        """True if the gates have a parameter."""
        return self.kind != "fixed"

    def __post_init__(self):
        expect(self.kind in GATE_KINDS, "gates.kind", self.kind, f"one of {', '.join(GATE_KINDS)}")
        low, high = GATE_RANGE
        valid = is_number(self.temperature) and low <= self.temperature <= high
        expect(valid, "gates.temperature", self.temperature, f"a number above 0, from {low} to {high:g}")
        pair = isinstance(self.stretch, Sequence) and len(self.stretch) == 2 and all(map(is_number, self.stretch))
        valid = pair and -high <= self.stretch[0] <= -low and 1 + low <= self.stretch[1] <= high
        wanted = f"a pair of numbers, one below 0 and one above 1, of at most {high:g} and {low} away from them"
        expect(valid, "gates.stretch", self.stretch, wanted)
        object.__setattr__(self, "stretch", tuple(self.stretch))  # JSON has lists


@dataclass(frozen=True)
class SiteState:
    """The state of a site.

    Attributes:
        role: "enc-self", "dec-self" or "dec-enc".
        num_heads: number of heads of the original module.
        query_key: the query/key projection that replaced the original one; None for the original.
        values: the narrower values; None for those of the original width.
        kept: the original numbers of the heads that are left, ascending; None if no head was removed.
        gates: the gates on the heads that are left; None without.
        alphas: whether an alpha matrix mixes the heads that are left.
    """

    role: Role
    num_heads: int
    query_key: QueryKeyState | None = None
    values: ValueState | None = None
    kept: tuple[int, ...] | None = None
    gates: GateState | None = None
    alphas: bool = False

    def __post_init__(self):
        expect(self.role in ROLES, "role", self.role, f"one of {', '.join(ROLES)}")
        expect(is_size(self.num_heads), "num_heads", self.num_heads, SIZE)
        if self.kept is not None:
            numbers = isinstance(self.kept, Sequence) and all(is_index(head, self.num_heads) for head in self.kept)
            ascending = numbers and all(a < b for a, b in zip(self.kept, self.kept[1:], strict=False))
            fewer = ascending and len(self.kept) < self.num_heads
            expect(fewer, "kept", self.kept, f"some of the heads 0 to {self.num_heads - 1}, ascending")
            object.__setattr__(self, "kept", tuple(self.kept))
        if not self.heads:
            empty = self.query_key is None and self.gates is None
            expect(empty, "kept", self.kept, "at least one head where there are gates or a query/key projection")
        expect(isinstance(self.alphas, bool), "alphas", self.alphas, "true or false")
        expect(not self.alphas or self.heads > 1, "alphas", self.alphas, f"false: {self.heads} heads cannot be mixed")
        alone = self.values is not None and self.query_key is None
        expect(not alone, "values", self.values, "none where there is no query_key")
        if self.query_key is not None:
            self.check_width(self.query_key)

    def check_width(self, query_key: QueryKeyState) -> None:
        """Raise ConfigError if the width of the query/key projection does not fit the heads."""
        exact = self.num_heads * query_key.dim_head
        expect(query_key.dim <= exact, "query_key.dim", query_key.dim, f"at most {exact}, which is exact")
        if query_key.kind in DIVIDED and query_key.dim % self.heads:
            raise ConfigError(
                f"query_key.dim {query_key.dim} of a {query_key.kind} site is not a multiple of its {self.heads} heads"
            )
        if query_key.groups is not None:
            fits = len(query_key.groups) == self.heads
            expect(fits, "query_key.groups", query_key.groups, f"one entry for each of the {self.heads} heads")

    @property
    def head_numbers(self) -> Sequence[int]:
        """The original numbers of the heads that are left."""
        return range(self.num_heads) if self.kept is None else self.kept

    @property
    def heads(self) -> int:
        """The number of heads that are left."""
        return len(self.head_numbers)

    @property
    def changes_output(self) -> bool:
        """True if the output projection differs from the original one."""
        return any((self.kept is not None, self.values is not None, self.gates is not None, self.alphas))

    @property
    def is_stock(self) -> bool:
        """True if nothing about the site is changed."""
        return self.query_key is None and not self.changes_output

    def to_dict(self) -> dict:
        """Return the JSON form, without parts that the site does not have."""
        entries = {name: value for name, value in dataclasses.asdict(self).items() if value not in (None, False)}
        parts = {name: value for name, value in entries.items() if isinstance(value, dict)}
        return entries | {
            name: {key: value for key, value in part.items() if value is not None} for name, part in parts.items()
        }


@dataclass(frozen=True)
class FeedForwardState:
    """The state of a feed-forward block.

    Attributes:
        role: "enc-ffn" or "dec-ffn".
        num_neurons: number of neurons of the original block.
        neurons: number of neurons that are left; without any, the block is the bias of its last projection.
    """

    role: FeedForwardRole
    num_neurons: int
    neurons: int

    def __post_init__(self):
        expect(self.role in FEED_FORWARD_ROLES, "role", self.role, f"one of {', '.join(FEED_FORWARD_ROLES)}")
        expect(is_size(self.num_neurons), "num_neurons", self.num_neurons, SIZE)
        valid = type(self.neurons) is int and 0 <= self.neurons <= self.num_neurons
        expect(valid, "neurons", self.neurons, f"an integer from 0 to {self.num_neurons}")

    @property
    def is_stock(self) -> bool:
        """True if no neuron was removed."""
        return self.neurons == self.num_neurons

    def to_dict(self) -> dict:
        """Return the JSON form."""
        return dataclasses.asdict(self)


def expect(condition: bool, name: str, value: object, wanted: str) -> None:
    """Raise ConfigError, with the name, the value and the expected form, unless the condition holds."""
    if not condition:
        raise ConfigError(f"{name} is {value!r:.1000}, expected {wanted}")
