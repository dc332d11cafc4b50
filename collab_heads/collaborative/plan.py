"""Which sites get which query/key projection."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from collab_heads.collaborative.kinds import FITS
from collab_heads.collaborative.widths import Width, resolve_width, widths_asked
from collab_heads.model.open_site import OpenSite, open_sites
from collab_heads.registry import AttentionAdapter
from collab_heads.sites import AttentionWeights, select_sites
from collab_heads.state import MixingInit, QueryKeyKind, QueryKeyState


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
        return QueryKeyState(self.kind, dim, self.weights.dim_head, self.weights.scale, has_bias, self.mixing_init)


def sites_to_swap(
    model: PreTrainedModel,
    adapter: AttentionAdapter,
    sites: str | Iterable[str] | None,
    asked: Width | Mapping[str, Width],
) -> list[tuple[OpenSite, Width]]:
    """The sites that the user names, with heads, each with the width that is asked for it.

    Raises:
        ArgumentError: if a role or a path does not exist, or what is asked names a site that is left out.
    """
    available = adapter.sites_with_heads(model)
    widths = widths_asked(available, select_sites(available, sites), asked)
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
