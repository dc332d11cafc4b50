"""Give a compressed model projections under their stock names, as wide as its own, for converters that read these.

Shapes: n heads of a site that are left, N heads that it gets, w the width of a head.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ModelStateError
from collab_heads.heads.fold_layout import stock_twin
from collab_heads.layers.fused import FusedPart, whole_of
from collab_heads.layers.layout import become, set_weight, weight_of, widths
from collab_heads.layers.output import HeadOutputProjection, fold_output
from collab_heads.model.apply_state import restore_neurons
from collab_heads.model.open_layers import OpenLayers, OpenSite
from collab_heads.sites.site import count_key_heads
from collab_heads.sites.state import DIVIDED

LEAST = 8  # the width of heads, and the number of neurons, where all are gone
FEWEST = 2  # heads: CTranslate2 takes one for the key head of several, of the original's width


@dataclass(frozen=True)
class Heads:
    """The heads that a site gets, and the places of its own among them; the others are zeros.

    Attributes:
        count: the number of heads.
        places: the places of the heads that are left.
        key_count: the number of key/value heads.
        key_places: the places of those that are left.
    """

    count: int
    places: Sequence[int]
    key_count: int
    key_places: Sequence[int]

    def of(self, *, is_query: bool) -> tuple[Sequence[int], int]:
        """Return the places and the number of the heads of queries, or of keys and values."""
        return (self.places, self.count) if is_query else (self.key_places, self.key_count)


@torch.no_grad()
def as_stock_layers(model: PreTrainedModel, takes: str, head_entries: Sequence[str]) -> tuple[str, ...]:
    """Give the sites of a model projections under their stock names, in place, and list those filled with zeros.

    All heads of a site get one width, and all sites one number of heads: narrower queries and keys, or values, and
    removed heads are filled with zeros. Gates and alphas are multiplied into the output projections. The model runs no
    more; it serves to be read.

    Args:
        model: a stock or changed model.
        takes: what the layers are for; it stands in the messages.
        head_entries: the config entries for the number of heads, which are set where all sites get another one.

    Raises:
        ModelStateError: if heads share queries and keys, or keep frequency pairs of their own; the message names the
            site and the call that helps.
    """
    adapter = get_adapter(model)
    layers = OpenLayers.of(model, adapter)
    changed = [site for site in layers.attention if site.path in layers.record.sites]
    for site in changed:
        check_kind(site, takes)
    notes, stock = [], stock_twin(model, [])
    stock_sites = dict(zip(layers.attention, OpenLayers.of(stock, adapter).attention, strict=True))
    count = common_count(adapter, model, stock_sites)
    for site in changed if count is None else layers.attention:
        if filled := write_heads(site, stock_sites[site].module, stock_sites[site].output, count):
            notes.append(f"{site.path}: {filled}")
    if count is not None:
        for name in head_entries:
            setattr(model.config, name, count)
    for block in layers.feed_forwards:
        if not block.num_neurons:
            restore_neurons(block, LEAST)
    return tuple(notes)


def check_kind(site: OpenSite, takes: str) -> None:
    """Raise ModelStateError where the queries and keys of a site have no stock form, however wide."""
    if not site.num_heads or site.query_key is None:
        return
    kind = site.query_key.state.kind
    if kind not in DIVIDED:
        raise ModelStateError(
            f"{site.path} has queries and keys that heads share (kind {kind!r}), while {takes} takes heads with their "
            "own: compress with kind='per_head'"
        )
    if getattr(site.query_key, "pairs", None) is not None:
        raise ModelStateError(
            f"{site.path} keeps frequency pairs of its own, while {takes} turns all heads by those that follow from "
            "the config: compress with shape='ctranslate2', or with parts=('heads', 'neurons')"
        )


def common_count(
    adapter: AttentionAdapter, model: PreTrainedModel, stock_sites: Mapping[OpenSite, OpenSite]
) -> int | None:
    """Return the fewest heads that all sites can have; None to keep the number of the original.

    Where heads share key heads or a table of positions, or a config gives their width, each has its place.
    """
    has_places = adapter.position_table is not None or adapter.positions is not None
    if has_places or getattr(model.config, "head_dim", None) is not None:
        return None
    most = max(FEWEST, *(site.num_heads for site in stock_sites))
    before = max(adapter.num_heads(stock.module) for stock in stock_sites.values())
    return most if most < before else None


def write_heads(site: OpenSite, stock: nn.Module, stock_output: nn.Module, count: int | None) -> str:
    """Give a site projections under their stock names, in place; return what was filled with zeros, if anything.

    Args:
        site: the site.
        stock: its module in a stock model.
        stock_output: the output projection there.
        count: the number of heads that it gets; None for that of the original.
    """
    adapter, heads, own = site.adapter, heads_of(site, stock, count), dict[str, Rows]()
    if isinstance(site.output, HeadOutputProjection):
        fold_output(site.output)
    stock_width = widths(stock_output)[0] // adapter.num_heads(stock)
    if site.num_heads:
        keys = count_key_heads(site.num_heads, site.site.groups)
        query, key = site.projections if site.query_key is None else shared(site.query_key)
        # converters take the scale from the width that they think a head has; it is that of the original heads
        believed = stock_width if count is None else widths(stock_output)[1] // heads.count
        scale = math.sqrt(believed / stock_width)
        own = {"query": Rows.of(query, site.num_heads, scale), "key": Rows.of(key, keys)}
        own["value"] = Rows.of(site.value, keys)
    least = LEAST if adapter.positions is None else stock_width  # positions turn heads of that width
    width = max((rows.weight.shape[1] for rows in own.values()), default=least)
    like, has_bias = next(iter(site.model.parameters())), any(rows.bias is not None for rows in own.values())
    found = {}
    for name, part in parts_of(adapter, stock).items():
        places, total = heads.of(is_query=name == "query")
        empty = Rows(like.new_zeros(0, width, part.in_features), None)
        found[name] = own.get(name, empty).placed(places, total, width, has_bias=has_bias)
    write_projections(adapter, site.module, stock, found)
    for name, child in stock.named_children():  # norms of queries and keys, which a site without heads has lost
        if not hasattr(site.module, name):
            made = child.to_empty(device=like.device)
            for parameter in made.parameters():
                parameter.fill_(1.0)
            setattr(site.module, name, made)
    write_output(site, stock_output, heads, width, like)
    return ", ".join(filled(site, heads, own, width))


@dataclass(frozen=True)
class Rows:
    """The rows of a projection.

    Attributes:
        weight: [n, w, D].
        bias: [n, w], or None.
    """

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, projection: nn.Linear | FusedPart, heads: int, scale: float = 1.0) -> "Rows":
        """Read the rows of a projection, times a scale."""
        weight, bias = projection.weight.detach(), projection.bias
        return cls(
            scale * weight.unflatten(0, (heads, -1)),
            None if bias is None else scale * bias.detach().unflatten(0, (heads, -1)),
        )

    def placed(self, places: Sequence[int], count: int, width: int, *, has_bias: bool) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of more heads, or wider ones, zeros elsewhere: [count * width, D], [count * width]."""
        weight = self.weight.new_zeros(count, width, self.weight.shape[-1])
        weight[list(places), : self.weight.shape[1]] = self.weight
        bias = self.weight.new_zeros(count, width)
        if self.bias is not None:
            bias[list(places), : self.bias.shape[1]] = self.bias
        return weight.flatten(0, 1), bias.flatten() if has_bias else None


def heads_of(site: OpenSite, stock: nn.Module, count: int | None) -> Heads:
    """Return the heads that a site gets: `count`, its own first, or those of the original, each in its place."""
    if count is not None:
        return Heads(count, range(site.num_heads), count, range(site.num_heads))
    whole, groups = site.adapter.num_heads(stock), site.adapter.groups(stock)
    keys, key_places = whole, site.head_numbers
    if groups is not None:
        keys, key_places = count_key_heads(whole, groups), tuple(sorted({groups[head] for head in site.head_numbers}))
    return Heads(whole, site.head_numbers, keys, key_places)


def shared(query_key: Any) -> tuple[nn.Linear, nn.Linear]:
    """Return the query and the key projection of heads that have their own dimensions."""
    return query_key.shared_query, query_key.shared_key


def parts_of(adapter: AttentionAdapter, stock: nn.Module) -> dict[str, nn.Linear | FusedPart]:
    """Return query, key and value of a stock module."""
    query, key = adapter.projections(stock)
    return {"query": query, "key": key, "value": adapter.value_projection(stock)}


def write_projections(
    adapter: AttentionAdapter, module: nn.Module, stock: nn.Module, found: Mapping[str, tuple[Tensor, Tensor | None]]
) -> None:
    """Give a module the projections of a stock one, with other weights; fused where these are, in place."""
    wholes: dict[nn.Module, dict[int, str]] = {}
    for name, part in parts_of(adapter, stock).items():
        number = part.number if isinstance(part, FusedPart) else 0
        wholes.setdefault(whole_of(part), {})[number] = name
    for whole, names in wholes.items():
        weights, biases = zip(*(found[names[number]] for number in sorted(names)), strict=True)
        own_name = next(name for name, child in stock.named_children() if child is whole)
        made = cast(Any, copy.copy(whole))
        made._parameters = dict(whole._parameters)
        set_weight(made, torch.cat(weights), requires_grad=False)
        made.bias = None if biases[0] is None else nn.Parameter(torch.cat(biases), requires_grad=False)
        if own_name in module._modules or not hasattr(module, own_name):
            setattr(module, own_name, made)
        else:  # what stands in for the values of a site without heads is not a module
            delattr(module, own_name)
            setattr(module, own_name, made)


def write_output(site: OpenSite, stock: nn.Module, heads: Heads, width: int, like: Tensor) -> None:
    """Give the output projection the columns of all heads that its site gets, in place."""
    output, n = site.output, site.num_heads
    weight = like.new_zeros(widths(stock)[1], heads.count, width)
    if n:
        own = weight_of(output).detach().unflatten(-1, (n, -1))
        weight[:, list(heads.places), : own.shape[2]] = own
    become(output, type(stock))
    set_weight(output, weight.flatten(1), requires_grad=False)


def filled(site: OpenSite, heads: Heads, own: Mapping[str, Rows], width: int) -> Iterator[str]:
    """Yield what was filled with zeros."""
    if 0 < site.num_heads < heads.count:
        yield f"heads from {site.num_heads} to {heads.count}"
    for name, rows in own.items():
        if rows.weight.shape[1] < width:
            yield f"{name} from width {rows.weight.shape[1]} to {width}"
