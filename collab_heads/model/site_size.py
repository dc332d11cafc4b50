"""Compute the size of a site now, or with fewer heads, narrower queries, keys and values, or fewer neurons.

Shapes: H heads, H_k key heads, d_k and d_v the widths of a query/key head and of a value head; D_q, D_k and D those of
the inputs of queries and of keys, and of the output of W_O; F neurons.
"""

import functools
from dataclasses import dataclass

from collab_heads.layers.layout import weight_of, widths
from collab_heads.layers.query_key import QueryKey
from collab_heads.layers.query_key_kinds import build_query_key
from collab_heads.layers.removed import NoHeads
from collab_heads.model.open_layers import OpenFeedForward, OpenSite
from collab_heads.sites.site import count_key_heads
from collab_heads.sites.state import DIVIDED, QueryKeyState


@dataclass(frozen=True)
class FeedForwardGeometry:
    """Everything on which the size of a feed-forward block depends.

    Attributes:
        neurons: F.
        dims: the widths of the inputs of the first projections and of the output of the last one.
        branches: the values that make a neuron: 2 where the block is gated.
        biases: the number of branches whose first projection has a bias, and whether the last one has one.
    """

    neurons: int
    dims: tuple[int, int]
    branches: int
    biases: tuple[int, bool]

    @property
    def inner_widths(self) -> tuple[int, ...]:
        """The widths inside of the block."""
        return (self.neurons,)

    @classmethod
    def of(cls, block: OpenFeedForward) -> "FeedForwardGeometry":
        """Read the geometry of a block."""
        first, last = block.first[0], block.output
        dims = widths(first)[0], widths(last)[1]
        biased = block.parts * sum(each.bias is not None for each in block.first)
        return cls(block.num_neurons, dims, block.branches, (biased, last.bias is not None))


@dataclass(frozen=True)
class Geometry:
    """Everything on which the size of a site depends.

    Attributes:
        num_heads: H.
        dim_head: d_k of the original module.
        dim_value: d_v.
        dims: D_q, D_k and D.
        biases: whether query, key, value and output have a bias.
        query_key: the collaborative query/key projection; None for stock ones.
        groups: the key head of every head; None where each has its own.
    """

    num_heads: int
    dim_head: int
    dim_value: int
    dims: tuple[int, int, int]
    biases: tuple[bool, bool, bool, bool]
    query_key: QueryKeyState | None = None
    groups: tuple[int, ...] | None = None

    @classmethod
    def of(cls, site: OpenSite) -> "Geometry":
        """Read the geometry of a site that has heads."""
        heads = site.adapter.num_heads(site.module)
        if site.query_key is None:
            query, key = site.projections
            dim_query, dim_head = query.in_features, query.out_features // heads
            biases = query.bias is not None, key.bias is not None
        else:
            dim_query, dim_head = site.query_key.shared_query.in_features, site.query_key.state.dim_head
            biases = site.query_key.state.bias, False
        return cls(
            heads,
            dim_head,
            site.value_width,
            (dim_query, site.value.in_features, weight_of(site.output).shape[0]),
            (*biases, site.value.bias is not None, site.output.bias is not None),
            None if site.query_key is None else site.query_key.state,
            site.adapter.groups(site.module),
        )

    @property
    def key_heads(self) -> int:
        return count_key_heads(self.num_heads, self.groups)

    @property
    def query_key_width(self) -> int:
        """The width of the query/key projection over all heads."""
        return self.num_heads * self.dim_head if self.query_key is None else self.query_key.dim

    @property
    def inner_widths(self) -> tuple[int, ...]:
        """The widths of the queries, of the keys, of the values and of what W_O reads, each over all heads."""
        query, divides = self.query_key_width, self.query_key is None or self.query_key.kind in DIVIDED
        key = query // max(self.num_heads, 1) * self.key_heads if divides else query
        return query, key, self.key_heads * self.dim_value, self.num_heads * self.dim_value


@dataclass(frozen=True)
class SiteSize:
    """The size of a site, without its gates and alphas.

    Attributes:
        parameters: parameters of its projections.
        query_key: those of the query/key projection among them.
        cache: elements cached per token.
        per_query: multiplications per query token, of the query and output projections, or of a feed-forward block.
        per_key: multiplications per key token, of the key and value projections.
        per_pair: multiplications per query token and key token, of the scores and the weighted sum of the values.
    """

    parameters: int
    query_key: int = 0
    cache: int = 0
    per_query: int = 0
    per_key: int = 0
    per_pair: int = 0


def site_size(site: OpenSite) -> SiteSize:
    """Return the size of a site as it is now, with or without heads."""
    if not site.adapter.num_heads(site.module):
        return SiteSize(sum(parameter.numel() for parameter in site.output.parameters()), cache=NoHeads.cache_width)
    return size_of(Geometry.of(site))


@functools.lru_cache(maxsize=1 << 16)
def size_of(geometry: Geometry | FeedForwardGeometry) -> SiteSize:
    """Return the size of a site with a geometry, with or without heads or neurons."""
    return attention_size(geometry) if isinstance(geometry, Geometry) else feed_forward_size(geometry)


def feed_forward_size(geometry: FeedForwardGeometry) -> SiteSize:
    (dim_in, dim_out), (biased, last_bias) = geometry.dims, geometry.biases
    products = geometry.neurons * (geometry.branches * dim_in + dim_out)
    biases = geometry.neurons * biased + dim_out * last_bias
    return SiteSize(products + biases, per_query=products)


def attention_size(geometry: Geometry) -> SiteSize:
    (dim_query, dim_key, dim_output), (query_bias, key_bias, value_bias, output_bias) = geometry.dims, geometry.biases
    heads, state = geometry.num_heads, geometry.query_key
    if not heads:
        return SiteSize(dim_output * output_bias, cache=NoHeads.cache_width)
    values, summed = geometry.key_heads * geometry.dim_value, heads * geometry.dim_value
    if state is None:
        score, keys = heads * geometry.dim_head, geometry.key_heads * geometry.dim_head
        query_products, key_products = score * dim_query, keys * dim_key
        query_key = query_products + score * query_bias + key_products + keys * key_bias
    else:
        projection = empty(state, heads, dim_query, dim_key)
        keys = projection.cache_width
        score = keys * heads if projection.has_one_key else state.dim
        query_products, key_products = projection.products_per_token
        query_key = sum(parameter.numel() for parameter in projection.parameters())
    value_products, output_products = values * dim_key, summed * dim_output
    return SiteSize(
        parameters=query_key + value_products + values * value_bias + output_products + dim_output * output_bias,
        query_key=query_key,
        cache=keys + values,
        per_query=query_products + output_products,
        per_key=key_products + value_products,
        per_pair=score + summed,
    )


@functools.lru_cache(maxsize=1 << 12)
def empty(state: QueryKeyState, num_heads: int, dim_query: int, dim_key: int) -> QueryKey:
    """Return a query/key projection on the meta device, without numbers."""
    return build_query_key(state, num_heads, dim_query, dim_key, device="meta")
