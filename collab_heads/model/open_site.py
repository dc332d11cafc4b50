"""A site with its modules at hand, so that nothing is looked up by its path again."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.layers.fused import Projection
from collab_heads.layers.layout import widths
from collab_heads.layers.output import dense_weight
from collab_heads.layers.query_key import QueryKey, is_swapped
from collab_heads.sites.record import CollabConfig, kept_heads
from collab_heads.sites.site import AttentionSite, AttentionWeights, Role


@dataclass(frozen=True, eq=False)
class OpenSite:
    """A site of attention in a model: its modules, and how its family reads them.

    Modules change their class in place, so an open site stays good while its model is changed; `site` and
    `head_numbers` say what was true when it was opened.

    Attributes:
        site: path, role, layer and number of heads.
        module: the attention module.
        adapter: of the model's family.
        model: whose site it is.
        head_numbers: the numbers that its heads had before any was removed.
    """

    site: AttentionSite
    module: nn.Module
    adapter: AttentionAdapter
    model: PreTrainedModel
    head_numbers: tuple[int, ...]

    @property
    def path(self) -> str:
        """Dotted path of the attention module, relative to the base model."""
        return self.site.path

    @property
    def role(self) -> Role:
        """One of `sites.ROLES`."""
        return self.site.role

    @property
    def num_heads(self) -> int:
        """H."""
        return self.site.num_heads

    @property
    def is_swapped(self) -> bool:
        """Whether it holds a collaborative query/key projection."""
        return is_swapped(self.module)

    @property
    def query_key(self) -> QueryKey | None:
        """Its collaborative query/key projection, if it holds one."""
        return cast(QueryKey, self.module.query_key) if self.is_swapped else None

    @property
    def projections(self) -> tuple[Projection, Projection]:
        """What the query-side and the key-side input go into, of a site that is not collaborative."""
        return self.adapter.projections(self.module)

    @property
    def value(self) -> Projection:
        """What makes the values; a Linear of its own where the site is collaborative."""
        return self.adapter.value_projection(self.module)

    @cached_property
    def output(self) -> nn.Module:
        """What takes the concatenated heads; asked for late, since not every adapter says where it is."""
        return self.adapter.output_projection(self.model, self.site)

    def read(self) -> AttentionWeights:
        """The weights of a site that is not collaborative, per head, without copying."""
        return self.adapter.read(self.module)

    @property
    def query_key_width(self) -> int:
        """H * d_k, or R of a collaborative site: the width of its query/key projection over all heads."""
        return self.projections[0].out_features if self.query_key is None else self.query_key.state.dim

    @property
    def dim_value(self) -> int:
        """H_k * d_v, the width of the values over all key/value heads."""
        return self.value.out_features

    @property
    def value_width(self) -> int:
        """d_v, the width of a value head."""
        return widths(self.output)[0] // self.adapter.num_heads(self.module)

    @property
    def groups(self) -> tuple[int, ...]:
        """The key/value head of every head; its own number where each has its own."""
        return tuple(range(self.num_heads)) if self.site.groups is None else self.site.groups

    def output_weight(self) -> Tensor:
        """W_O as it applies in evaluation, gates and alphas included: [D, H * d_v]."""
        return dense_weight(self.output)


def open_sites(
    model: PreTrainedModel, adapter: AttentionAdapter, sites: Iterable[AttentionSite] | None = None
) -> list[OpenSite]:
    """Open some of the sites of a model; without `sites` all that have heads, in model order."""
    states, base = CollabConfig.on(model).sites, model.base_model
    return [
        OpenSite(site, base.get_submodule(site.path), adapter, model, tuple(kept_heads(states, site)))
        for site in (adapter.sites_with_heads(model) if sites is None else sites)
    ]


def reopened(site: OpenSite) -> OpenSite:
    """Open a site again, as it is now."""
    (now,) = [each for each in open_sites(site.model, site.adapter) if each.path == site.path]
    return now
