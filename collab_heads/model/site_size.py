"""Compute the size of a site now, or with fewer heads, another query/key projection or narrower values.

Shapes: H heads, H_k key heads, d_k and d_v the widths of a query/key head and of a value head; D_q, D_k and D those of
the inputs of queries and of keys, and of the output of W_O.
"""

import functools
from dataclasses import dataclass

from collab_heads.layers.layout import weight_of
from collab_heads.layers.query_key import QueryKey
from collab_heads.layers.query_key_kinds import build_query_key
from collab_heads.layers.removed import NoHeads
from collab_heads.model.open_site import OpenSite
from collab_heads.sites.site import count_key_heads
from collab_heads.sites.state import QueryKeyState


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


@dataclass(frozen=True)
class SiteSize:
    """The size of a site, without its gates and alphas.

    Attributes:
        query_key: parameters of the query/key projection.
        value_output: parameters of the value and output projections.
        cache: elements cached per token.
        per_query: multiplications per query token, of the query and output projections.
        per_key: multiplications per key token, of the key and value projections.
        per_pair: multiplications per query token and key token, of the scores and the weighted sum of the values.
    """

    query_key: int
    value_output: int
    cache: int
    per_query: int = 0
    per_key: int = 0
    per_pair: int = 0

    @property
    def parameters(self) -> int:
        """Parameters of the four projections."""
        return self.query_key + self.value_output


def site_size(site: OpenSite) -> SiteSize:
    """Return the size of a site as it is now, with or without heads."""
    if not site.adapter.num_heads(site.module):
        return SiteSize(0, sum(parameter.numel() for parameter in site.output.parameters()), NoHeads.cache_width)
    return size_of(Geometry.of(site))


@functools.lru_cache(maxsize=1 << 16)
def size_of(geometry: Geometry) -> SiteSize:
    (dim_query, dim_key, dim_output), (query_bias, key_bias, value_bias, output_bias) = geometry.dims, geometry.biases
    heads, state = geometry.num_heads, geometry.query_key
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
        query_key=query_key,
        value_output=value_products + values * value_bias + output_products + dim_output * output_bias,
        cache=keys + values,
        per_query=query_products + output_products,
        per_key=key_products + value_products,
        per_pair=score + summed,
    )


@functools.lru_cache(maxsize=1 << 12)
def empty(state: QueryKeyState, num_heads: int, dim_query: int, dim_key: int) -> QueryKey:
    """Return a query/key projection on the meta device, without numbers."""
    return build_query_key(state, num_heads, dim_query, dim_key, device="meta")
