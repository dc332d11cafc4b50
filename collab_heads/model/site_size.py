"""Compute the size of a site now, or with fewer heads, narrower queries, keys and values, or fewer neurons.

Shapes: H heads, H_k key heads, d_k and d_v the widths of a query/key head and of a value head; D_q, D_k and D those of
the inputs of queries and of keys, and of the output of W_O; F neurons; V rows of a table.
"""

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import nn

from collab_heads.base.option_values import BITS
from collab_heads.layers.layout import weight_of, widths
from collab_heads.layers.query_key import QueryKey
from collab_heads.layers.query_key_kinds import build_query_key
from collab_heads.layers.removed import NoHeads
from collab_heads.layers.weight_grid import BYTE, bits_of, grid_bytes, shape_of
from collab_heads.model.open_layers import OpenFeedForward, OpenSite, OpenTable
from collab_heads.sites.site import count_key_heads
from collab_heads.sites.state import DIVIDED, QueryKeyState

FLOAT = 32  # bits of a weight that is on no grid, and of what never is


@dataclass(frozen=True)
class FeedForwardGeometry:
    """Everything on which the size of a feed-forward block depends.

    Attributes:
        neurons: F.
        dims: the widths of the inputs of the first projections and of the output of the last one.
        branches: the values that make a neuron: 2 where the block is gated.
        biases: the number of branches whose first projection has a bias, and whether the last one has one.
        bits: of a weight.
    """

    neurons: int
    dims: tuple[int, int]
    branches: int
    biases: tuple[int, bool]
    bits: int = FLOAT

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
        return cls(block.num_neurons, dims, block.branches, (biased, last.bias is not None), stored_bits(last))


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
        bits: of a weight.
        positions: the number of projected positions that the query and the key of a token meet.
    """

    num_heads: int
    dim_head: int
    dim_value: int
    dims: tuple[int, int, int]
    biases: tuple[bool, bool, bool, bool]
    query_key: QueryKeyState | None = None
    groups: tuple[int, ...] | None = None
    bits: int = FLOAT
    positions: int = 0

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
            stored_bits(site.output),
            site.adapter.positions_met(site.module),
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
class TableGeometry:
    """Everything on which the size of a table depends.

    Attributes:
        rows: V.
        dim: D.
        bits: of a weight.
    """

    rows: int
    dim: int
    bits: int = FLOAT
    inner_widths: ClassVar[tuple[int, ...]] = ()

    @classmethod
    def of(cls, table: OpenTable) -> "TableGeometry":
        """Read the geometry of a table."""
        rows, dim = weight_of(table.output).shape
        return cls(rows, dim, stored_bits(table.output))


AnyGeometry: TypeAlias = Geometry | FeedForwardGeometry | TableGeometry


def stored_bits(module: nn.Module) -> int:
    """Return the bits of the dtype of a module's weight; if it lies on a grid, it may leave it."""
    return BYTE * weight_of(module).element_size()


@dataclass(frozen=True)
class SiteSize:
    """The size of a site, without its gates and alphas.

    Attributes:
        parameters: parameters of its projections.
        bytes: of its projections in a checkpoint.
        query_key: those of the query/key projection among them.
        cache: elements cached per token.
        per_query: multiplications per query token, of the query and output projections, or of a feed-forward block.
        per_key: multiplications per key token, of the key and value projections.
        per_pair: multiplications per query token and key token, of the scores and the weighted sum of the values.
    """

    parameters: int
    bytes: int = 0
    query_key: int = 0
    cache: int = 0
    per_query: int = 0
    per_key: int = 0
    per_pair: int = 0


def site_size(site: OpenSite) -> SiteSize:
    """Return the size of a site as it is now, with or without heads."""
    if not site.adapter.num_heads(site.module):
        left = [*site.output.parameters()]
        sizes = (sum(each.numel() for each in left), sum(each.nbytes for each in left))
        return SiteSize(*sizes, cache=NoHeads.cache_width)
    return size_of(Geometry.of(site))


@functools.lru_cache(maxsize=1 << 16)
def size_of(geometry: AnyGeometry) -> SiteSize:
    """Return the size of a site with a geometry, with or without heads or neurons."""
    if isinstance(geometry, TableGeometry):
        return SiteSize(geometry.rows * geometry.dim, grid_bytes(geometry.rows, geometry.dim, geometry.bits))
    return attention_size(geometry) if isinstance(geometry, Geometry) else feed_forward_size(geometry)


def bytes_of(matrices: Iterable[tuple[int, int]], others: int, bits: int) -> int:
    """Return the bytes of matrices [outputs, inputs], and of other parameters, which are never on a grid."""
    each = FLOAT if bits in BITS else bits
    return sum(grid_bytes(*shape, bits) for shape in matrices) + others * each // BYTE


def num_bytes(model: nn.Module, *, in_full: bool = False) -> int:
    """Return the bytes that the weights of a model take in a checkpoint; those that are used twice count once.

    Args:
        model: the model.
        in_full: whether weights on grids count as if they were not packed.
    """
    never = set(getattr(model, "_keys_to_ignore_on_save", None) or ())  # sinusoids
    stored = [*model.named_parameters(), *persistent_buffers(model)]
    sizes = {id(tensor): tensor.nbytes for name, tensor in stored if name not in never}
    for module in () if in_full else model.modules():
        if (bits := bits_of(module)) is not None:
            sizes[id(module.weight)] = grid_bytes(*shape_of(weight_of(module)), bits)
    return sum(sizes.values())


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that lie in a checkpoint, such as the bias of Marian's logits."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}".lstrip("."), buffer


def feed_forward_size(geometry: FeedForwardGeometry) -> SiteSize:
    (dim_in, dim_out), (biased, last_bias) = geometry.dims, geometry.biases
    products = geometry.neurons * (geometry.branches * dim_in + dim_out)
    biases = geometry.neurons * biased + dim_out * last_bias
    matrices = (geometry.branches * geometry.neurons, dim_in), (dim_out, geometry.neurons)
    return SiteSize(products + biases, bytes_of(matrices, biases, geometry.bits), per_query=products)


def attention_size(geometry: Geometry) -> SiteSize:
    (dim_query, dim_key, dim_output), (query_bias, key_bias, value_bias, output_bias) = geometry.dims, geometry.biases
    heads, state = geometry.num_heads, geometry.query_key
    if not heads:
        left = dim_output * output_bias
        return SiteSize(left, bytes_of((), left, geometry.bits), cache=NoHeads.cache_width)
    values, summed = geometry.key_heads * geometry.dim_value, heads * geometry.dim_value
    if state is None:
        score, keys = heads * geometry.dim_head, geometry.key_heads * geometry.dim_head
        query_products, key_products = score * dim_query, keys * dim_key
        query_key = query_products + score * query_bias + key_products + keys * key_bias
        matrices = [(score, dim_query), (keys, dim_key)]
    else:
        projection = empty(state, heads, dim_query, dim_key)
        keys = projection.cache_width
        score = keys * heads if projection.has_one_key else state.dim
        query_products, key_products = projection.products_per_token
        query_key = sum(parameter.numel() for parameter in projection.parameters())
        matrices = [(*each.weight.shape,) for each in projection.modules() if isinstance(each, nn.Linear)]
    value_products, output_products = values * dim_key, summed * dim_output
    matrices += [(values, dim_key), (dim_output, summed)]
    parameters = query_key + value_products + values * value_bias + output_products + dim_output * output_bias
    return SiteSize(
        parameters=parameters,
        bytes=bytes_of(matrices, parameters - sum(map(math.prod, matrices)), geometry.bits),
        query_key=query_key,
        cache=keys + values,
        per_query=query_products + output_products + score * geometry.positions,
        per_key=key_products + value_products,
        per_pair=score + summed,
    )


@functools.lru_cache(maxsize=1 << 12)
def empty(state: QueryKeyState, num_heads: int, dim_query: int, dim_key: int) -> QueryKey:
    """Return a query/key projection on the meta device, without numbers."""
    return build_query_key(state, num_heads, dim_query, dim_key, device="meta")
