"""Which sites get which query/key projection, and which get narrower values."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedModel

from collab_heads.collaborative.kinds import FITS
from collab_heads.collaborative.widths import Width, resolve_width, rounded_up, widths_asked
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.errors import ArgumentError
from collab_heads.model.open_site import OpenSite, open_sites
from collab_heads.sites.record import CollabConfig
from collab_heads.sites.site import AttentionWeights, select_sites
from collab_heads.sites.state import MixingInit, QueryKeyKind, QueryKeyState, ValueState


@dataclass(frozen=True)
class SitePlan:
    """A stock site and the query/key projection that it is to get.

    Attributes:
        site: the site.
        weights: its weights.
        kind: of the projection.
        dim_asked: the width that was asked for, over all heads.
        dim: R, the width that it gets.
        mixing_init: how training from scratch starts.
    """

    site: OpenSite
    weights: AttentionWeights
    kind: QueryKeyKind
    dim_asked: int
    dim: int
    mixing_init: MixingInit = "concatenate"

    @property
    def is_exact(self) -> bool:
        """Whether nothing is lost at this width."""
        return self.dim >= self.weights.dim_query_key

    def state(self, dim: int | None = None) -> QueryKeyState:
        """What is stored of the projection, at the planned width or another one."""
        has_bias = self.weights.query_bias is not None
        dim = self.dim if dim is None else dim
        more = self.mixing_init, self.weights.groups
        return QueryKeyState(self.kind, dim, self.weights.dim_head, self.weights.scale, has_bias, *more)


@dataclass(frozen=True)
class ValuePlan:
    """A site and the width that its values are to get.

    Attributes:
        site: the site, collaborative or not.
        dim_asked: the width that was asked for, over all heads.
        dim: the width that they get, over all heads.
        dim_head: d_v of the original module.
    """

    site: OpenSite
    dim_asked: int
    dim: int
    dim_head: int

    @property
    def width(self) -> int:
        """Of a head."""
        return self.dim // self.site.site.num_key_heads

    @property
    def state(self) -> ValueState:
        """What is stored of the values."""
        return ValueState(self.width, self.dim_head)


class Chosen(NamedTuple):
    """The sites that a user names, in model order.

    Attributes:
        swapped: each with the width and the kind of the query/key projection that it is to get.
        narrowed: each with the width that is asked for its values.
    """

    swapped: list[tuple[OpenSite, Width, QueryKeyKind]]
    narrowed: list[tuple[OpenSite, Width]]


def choose_sites(
    model: PreTrainedModel,
    adapter: AttentionAdapter,
    sites: str | Iterable[str] | None,
    asked: Width | Mapping[str, Width],
    asked_value: Width | Mapping[str, Width],
    kind: QueryKeyKind,
) -> Chosen:
    """Say which sites get what.

    Where values get narrower and nothing is asked of query and key, these stay what they are: a site that is still a
    stock one gets the projection that holds its weights, since stock attention knows one width only.

    Args:
        model: the model.
        adapter: its adapter.
        sites: roles or paths; None for all.
        asked: widths of query/key projections.
        asked_value: widths of values; None for no site.
        kind: of the query/key projections whose width is asked for.

    Raises:
        ArgumentError: if a role or a path does not exist, what is asked names a site that is left out, or nothing is
            asked for.
    """
    values = [] if asked_value is None else sites_to_swap(model, adapter, sites, asked_value, "dim_value")
    narrowed: list[tuple[OpenSite, Width]] = [(site, width) for site, width in values if width is not None]
    widths: dict[str, tuple[Width, QueryKeyKind]]
    widths = {site.path: (None, adapter.exact_kind) for site, _ in narrowed if not site.is_swapped}
    if asked is not None or asked_value is None:
        widths |= {site.path: (width, kind) for site, width in sites_to_swap(model, adapter, sites, asked)}
    if not widths and not narrowed:
        raise ArgumentError("dim_value names no width: leave it out, or say how wide values are to be")
    swapped = [site for site in adapter.sites_with_heads(model) if site.path in widths]
    return Chosen([(site, *widths[site.path]) for site in open_sites(model, adapter, swapped)], narrowed)


def plan_values(site: OpenSite, asked: Width) -> ValuePlan:
    """Turn what is asked for the values of a site, a share of the width that they have, into one that they can have.

    Raises:
        ArgumentError: if the width is out of range.
    """
    dim_asked, width = resolve_width(asked, site.site, site.dim_value, "dim_value"), site.value_width
    state = CollabConfig.on(site.model).site(site.site).values
    dim = rounded_up(dim_asked, site.site.num_key_heads, width)
    return ValuePlan(site, dim_asked, dim, width if state is None else state.dim_head)


def sites_to_swap(
    model: PreTrainedModel,
    adapter: AttentionAdapter,
    sites: str | Iterable[str] | None,
    asked: Width | Mapping[str, Width],
    argument: str = "dim_shared_query_key",
) -> list[tuple[OpenSite, Width]]:
    """The sites that the user names, with heads, each with the width that is asked for it.

    Raises:
        ArgumentError: if a role or a path does not exist, or what is asked names a site that is left out.
    """
    available = adapter.sites_with_heads(model)
    widths = widths_asked(available, select_sites(available, sites), asked, argument)
    chosen = [site for site in available if site.path in widths]
    return [(site, widths[site.path]) for site in open_sites(model, adapter, chosen)]


def plan_site(site: OpenSite, asked: Width, kind: QueryKeyKind, mixing_init: MixingInit = "concatenate") -> SitePlan:
    """Read a stock site, and turn what is asked for it into a width that its new projection can have.

    Raises:
        ArgumentError: if the width is out of range.
    """
    weights = site.read()
    dim_asked = resolve_width(asked, site.site, weights.dim_query_key)
    return SitePlan(site, weights, kind, dim_asked, FITS[kind].possible_width(dim_asked, weights), mixing_init)
