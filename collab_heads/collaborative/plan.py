"""Plan which sites get which query/key projection, and which get narrower values."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from collab_heads.collaborative.kinds import FITS
from collab_heads.collaborative.widths import Width, resolve_width, rounded_up, widths_asked
from collab_heads.errors import ArgumentError
from collab_heads.model.open_layers import OpenLayers, OpenSite
from collab_heads.sites.site import AttentionWeights, select_sites
from collab_heads.sites.state import MixingInit, QueryKeyKind, QueryKeyState, ValueState


@dataclass(frozen=True)
class SitePlan:
    """The plan of a stock site: the query/key projection that it gets.

    Attributes:
        site: the site.
        weights: its weights.
        kind: the kind of the projection.
        dim_asked: the requested width, over all heads.
        dim: R, the planned width.
        mixing_init: the initial mixing, for training from scratch.
    """

    site: OpenSite
    weights: AttentionWeights
    kind: QueryKeyKind
    dim_asked: int
    dim: int
    mixing_init: MixingInit = "concatenate"

    @property
    def is_exact(self) -> bool:
        """Return True if nothing is lost at the planned width."""
        return self.dim >= self.weights.dim_query_key

    def state(self, dim: int | None = None) -> QueryKeyState:
        """Return the state to record for the projection, at the planned width or at `dim`."""
        has_bias = self.weights.query_bias is not None
        dim = self.dim if dim is None else dim
        more = self.mixing_init, self.weights.groups
        return QueryKeyState(self.kind, dim, self.weights.dim_head, self.weights.scale, has_bias, *more)


@dataclass(frozen=True)
class ValuePlan:
    """The plan of the narrower values of a site.

    Attributes:
        site: the site, collaborative or not.
        dim_asked: the requested width, over all value heads.
        dim: the planned width, over all value heads.
        dim_head: d_v of the original module.
    """

    site: OpenSite
    dim_asked: int
    dim: int
    dim_head: int

    @property
    def width(self) -> int:
        """Return the planned width of one value head."""
        return self.dim // self.site.site.num_key_heads

    @property
    def state(self) -> ValueState:
        """Return the state to record for the values."""
        return ValueState(self.width, self.dim_head)


class SitesToChange(NamedTuple):
    """The sites to change, in model order.

    Attributes:
        swapped: sites that get a query/key projection, each with its requested width and its kind.
        narrowed: sites that get narrower values, each with their requested width.
    """

    swapped: list[tuple[OpenSite, Width, QueryKeyKind]]
    narrowed: list[tuple[OpenSite, Width]]


def choose_sites(
    layers: OpenLayers,
    sites: str | Iterable[str] | None,
    asked: Width | Mapping[str, Width],
    asked_value: Width | Mapping[str, Width],
    kind: QueryKeyKind,
) -> SitesToChange:
    """Choose the sites to change, with the requested widths and the kinds.

    If only values are to become narrower, queries and keys keep their weights. A stock site then gets the projection
    that holds these weights unchanged, since stock attention supports only one width.

    Args:
        layers: the layers of the model.
        sites: roles or paths; None for all.
        asked: requested widths of query/key projections.
        asked_value: requested widths of values; None for no site.
        kind: the kind of the query/key projections with a requested width.

    Raises:
        ArgumentError: if a role or a path does not exist, a width is requested for a site that `sites` leaves out, or
            no width is requested at all.
    """
    values = [] if asked_value is None else sites_to_swap(layers, sites, asked_value, "dim_value")
    narrowed: list[tuple[OpenSite, Width]] = [(site, width) for site, width in values if width is not None]
    widths: dict[str, tuple[Width, QueryKeyKind]]
    widths = {site.path: (None, layers.adapter.exact_kind) for site, _ in narrowed if not site.is_swapped}
    if asked is not None or asked_value is None:
        widths |= {site.path: (width, kind) for site, width in sites_to_swap(layers, sites, asked)}
    if not widths and not narrowed:
        raise ArgumentError("dim_value names no width: leave it out, or say how wide values are to be")
    swapped = [(site, *widths[site.path]) for site in layers.with_heads if site.path in widths]
    return SitesToChange(swapped, narrowed)


def plan_values(site: OpenSite, asked: Width) -> ValuePlan:
    """Turn the width requested for the values of a site into one that they can have; a share is of their present width.

    Raises:
        ArgumentError: if the width is out of range.
    """
    dim_asked, width = resolve_width(asked, site.site, site.dim_value, "dim_value"), site.value_width
    state = site.state.values
    dim = rounded_up(dim_asked, site.site.num_key_heads, width)
    return ValuePlan(site, dim_asked, dim, width if state is None else state.dim_head)


def sites_to_swap(
    layers: OpenLayers,
    sites: str | Iterable[str] | None,
    asked: Width | Mapping[str, Width],
    argument: str = "dim_shared_query_key",
) -> list[tuple[OpenSite, Width]]:
    """Return the sites with heads that the user names, each with the width requested for it.

    Raises:
        ArgumentError: if a role or a path does not exist, or a width is requested for a site that `sites` leaves out.
    """
    available = [site.site for site in layers.with_heads]
    widths = widths_asked(available, select_sites(available, sites), asked, argument)
    return [(site, widths[site.path]) for site in layers.with_heads if site.path in widths]


def plan_site(site: OpenSite, asked: Width, kind: QueryKeyKind, mixing_init: MixingInit = "concatenate") -> SitePlan:
    """Read a stock site, and turn the width requested for it into one that its new projection can have.

    Raises:
        ArgumentError: if the width is out of range.
    """
    weights = site.read()
    dim_asked = resolve_width(asked, site.site, weights.dim_query_key)
    return SitePlan(site, weights, kind, dim_asked, FITS[kind].possible_width(dim_asked, weights), mixing_init)
