"""What a site can become: fewer heads, narrower queries and keys, narrower values, and how large it is then."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from collab_heads.collaborative.kinds import FITS, kind_for
from collab_heads.collaborative.widths import HEAD_MULTIPLE
from collab_heads.layers.layout import weight_of
from collab_heads.layers.query_key import QueryKey
from collab_heads.layers.query_key_kinds import build_query_key
from collab_heads.model.open_site import OpenSite
from collab_heads.sites import count_key_heads, group_size
from collab_heads.state import DIVIDED, QueryKeyKind, QueryKeyState
from collab_heads.words import SITE_PARTS as PARTS
from collab_heads.words import SitePart as Part

LEVELS = 8  # widths per projection, and numbers of heads per site, that are considered: as many, or a few more


@dataclass(frozen=True, order=True)
class Choice:
    """What a site is to have.

    Attributes:
        heads: how many.
        query_key: width of the query/key projection: of a head where its kind divides it among the heads, else of all;
            None leaves the projection as it is.
        value: width of a value head.
    """

    heads: int
    query_key: int | None
    value: int


@dataclass(frozen=True)
class SiteShape:
    """All that the size of a site depends on.

    Attributes:
        num_heads: H, the heads that it has.
        dim_head: d_k, the width of a query/key head of the original module.
        dim_value: d_v, the width that a value head has.
        dims: the widths of the query-side inputs, of the key-side inputs, and of what W_O puts out.
        biases: whether query, key, value and output have one.
        query_key: the collaborative query/key projection that it has, with all its heads; None for stock ones.
        kind: of the projection that it gets.
        exact_kind: of the projection that holds the stock weights.
        scale: of its scores.
        parts: what of it may become smaller.
        decodes: whether it is of a decoder, which is called for one token after the other.
        groups: the key/value head of every head; None where each has its own.
    """

    num_heads: int
    dim_head: int
    dim_value: int
    dims: tuple[int, int, int]
    biases: tuple[bool, bool, bool, bool]
    query_key: QueryKeyState | None
    kind: QueryKeyKind
    exact_kind: QueryKeyKind
    scale: float
    parts: tuple[Part, ...] = PARTS
    decodes: bool = False
    groups: tuple[int, ...] | None = None

    @classmethod
    def of(cls, site: OpenSite, kind: QueryKeyKind, parts: tuple[Part, ...] = PARTS) -> "SiteShape":
        """Read it from a site."""
        output, value, heads = site.output, site.value, site.num_heads
        if site.query_key is not None:
            state: QueryKeyState | None = site.query_key.state
            dim_query = site.query_key.shared_query.in_features
            dim_head, scale = site.query_key.state.dim_head, site.query_key.state.scale
            biases = site.query_key.state.bias, False
        else:
            query, key = site.projections
            state, dim_query, dim_head = None, query.in_features, query.out_features // heads
            biases, scale = (query.bias is not None, key.bias is not None), site.adapter.scale(site.module)
        dims = dim_query, value.in_features, weight_of(site.output).shape[0]
        more = value.bias is not None, output.bias is not None
        exact, can_narrow = site.adapter.exact_kind, FITS[kind].capability in site.adapter.capabilities
        parts = tuple(part for part in parts if part != "query_key" or can_narrow)
        return cls(
            heads,
            dim_head,
            site.value_width,
            dims,
            (*biases, *more),
            state,
            kind_for(site.adapter, kind) if can_narrow else exact,
            exact,
            scale,
            parts,
            decodes=site.role != "enc-self",
            groups=site.site.groups,
        )

    @property
    def unchanged(self) -> Choice:
        """What it has now."""
        return Choice(self.num_heads, None, self.dim_value)

    @property
    def whole_query_key(self) -> int:
        """The width of the original query/key projection, counted as in `Choice.query_key`."""
        return self.dim_head * (1 if self.kind in DIVIDED else self.num_heads)

    def query_key_widths(self) -> list[int]:
        """The narrower query/key projections that are considered, see `Choice.query_key`; none where it has one."""
        return steps(self.whole_query_key) if self.query_key is None and "query_key" in self.parts else []

    def value_widths(self) -> list[int]:
        """The narrower value heads that are considered."""
        return steps(self.dim_value) if "values" in self.parts else []

    @property
    def heads_per_key(self) -> int | None:
        """How many heads share a key/value head, and go together; None where that differs, and all stay."""
        return 1 if self.groups is None else group_size(self.groups)

    def head_counts(self) -> list[int]:
        """The smaller numbers of heads that are considered."""
        if self.heads_per_key is None or "heads" not in self.parts:
            return []
        unit = -(-self.num_heads // self.heads_per_key // (2 * LEVELS)) * self.heads_per_key
        return list(range(unit, self.num_heads, unit))

    def groups_of(self, choice: Choice) -> tuple[int, ...] | None:
        """The key/value heads of the heads that a choice leaves."""
        if self.groups is None or self.heads_per_key is None:
            return self.groups
        return tuple(head // self.heads_per_key for head in range(choice.heads))

    def key_heads(self, choice: Choice) -> int:
        """The number of key/value heads that a choice leaves."""
        return count_key_heads(choice.heads, self.groups_of(choice))

    def choices(self) -> Iterator[Choice]:
        """All that are considered; the site as it is comes last."""
        each = (
            [*self.head_counts(), self.num_heads],
            [*self.query_key_widths(), None],
            [*self.value_widths(), self.dim_value],
        )
        for choice in itertools.starmap(Choice, itertools.product(*each)):
            if (self.dim_query_key(choice) or 0) <= choice.heads * self.dim_head and not self.is_slow(choice):
                yield choice

    def is_slow(self, choice: Choice) -> bool:
        """Whether a step of decoding would take longer than it does now.

        Kernels want one width, so the narrower of keys and values is padded, all that is cached at every step: beside a
        full width that costs more than the narrow one saves (measured: `benchmarks/compression_speed.py`).
        """
        may_differ = self.query_key is not None or not {"query_key", "values"} <= set(self.parts)
        return self.decodes and not may_differ and (choice.query_key is None) != (choice.value == self.dim_value)

    def dim_query_key(self, choice: Choice) -> int | None:
        """R of a choice, over all heads; None where the projection stays as it is."""
        if choice.query_key is None:
            return None
        return choice.query_key * (choice.heads if self.kind in DIVIDED else 1)

    def dim_over_heads(self, choice: Choice) -> int:
        """The width of the query/key projection over all heads, whatever it is."""
        state = self.state(choice)
        return choice.heads * self.dim_head if state is None else state.dim

    def state(self, choice: Choice) -> QueryKeyState | None:
        """The collaborative query/key projection of a choice; None for a stock one."""
        if self.query_key is not None:
            whole = self.query_key.dim
            is_divided, groups = self.query_key.kind in DIVIDED, self.groups_of(choice)
            left = whole // self.num_heads * choice.heads if is_divided else whole
            return replace(self.query_key, dim=left, groups=groups)
        kind: QueryKeyKind = self.kind
        dim: int | None = self.dim_query_key(choice)
        if dim is None and choice.value < self.dim_value:  # stock attention knows one width only
            kind, dim = self.exact_kind, self.dim_head * choice.heads
        if dim is None:
            return None
        return QueryKeyState(kind, dim, self.dim_head, self.scale, self.biases[0], groups=self.groups_of(choice))


def steps(width: int) -> list[int]:
    """The widths below one that are considered: multiples of 4, at most about `LEVELS` of them."""
    unit = max(HEAD_MULTIPLE, width // LEVELS // HEAD_MULTIPLE * HEAD_MULTIPLE)
    return list(range(unit, width, unit))


@dataclass(frozen=True)
class SiteSize:
    """How large a site is.

    Attributes:
        parameters: of its four projections.
        cache: elements that it caches per token.
        per_query: multiplications per query token, of the projections of queries and of what the heads put out.
        per_key: multiplications per key token, of the projections of keys and values.
        per_pair: multiplications per query token and key token, of the scores and of the sum of the values.
    """

    parameters: int
    cache: int
    per_query: int
    per_key: int
    per_pair: int


@functools.lru_cache(maxsize=1 << 16)
def size_of(shape: SiteShape, choice: Choice) -> SiteSize:
    """The size of a site as it would be."""
    (dim_query, dim_key, dim_output), (query_bias, key_bias, value_bias, output_bias) = shape.dims, shape.biases
    key_heads, state = shape.key_heads(choice), shape.state(choice)
    values, summed = key_heads * choice.value, choice.heads * choice.value
    if state is None:
        score, keys = choice.heads * shape.dim_head, key_heads * shape.dim_head
        query_products, key_products = score * dim_query, keys * dim_key
        count = query_products + score * query_bias + key_products + keys * key_bias
    else:
        query_key = empty(state, choice.heads, dim_query, dim_key)
        keys = query_key.cache_width
        score = keys * choice.heads if query_key.has_one_key else state.dim
        query_products, key_products = query_key.products_per_token
        count = sum(parameter.numel() for parameter in query_key.parameters())
    value_products, output_products = values * dim_key, summed * dim_output
    return SiteSize(
        parameters=count + value_products + values * value_bias + output_products + dim_output * output_bias,
        cache=keys + values,
        per_query=query_products + output_products,
        per_key=key_products + value_products,
        per_pair=score + summed,
    )


@functools.lru_cache(maxsize=1 << 12)
def empty(state: QueryKeyState, num_heads: int, dim_query: int, dim_key: int) -> QueryKey:
    """A projection without numbers in it."""
    return build_query_key(state, num_heads, dim_query, dim_key, device="meta")
