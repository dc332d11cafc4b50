"""Open sites: sites together with their modules, so that no module is looked up by its path again."""

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
    """A site of attention in a model: its modules, and the adapter that reads them.

    Modules change their class in place, so an open site stays valid while its model is changed. `site` and
    `head_numbers` describe the site at the time when it was opened.

    Attributes:
        site: path, role, layer and number of heads.
        module: the attention module.
        adapter: the adapter of the model's family.
        model: the model that the site belongs to.
        head_numbers: the numbers that its heads had before any was removed.
    """

    site: AttentionSite
    module: nn.Module
    adapter: AttentionAdapter
    model: PreTrainedModel
    head_numbers: tuple[int, ...]

    @property
    def path(self) -> str:
        """The dotted path of the attention module, relative to the base model."""
        return self.site.path

    @property
    def role(self) -> Role:
        """One of `sites.site.ROLES`."""
        return self.site.role

    @property
    def num_heads(self) -> int:
        return self.site.num_heads

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The attention module and the output projection, which may be inside it."""
        return self.module, self.output

    @property
    def token_modules(self) -> tuple[Projection, nn.Module]:
        """The modules that see the tokens that are attended to, and those that attend."""
        return self.value, self.output

    @property
    def is_swapped(self) -> bool:
        """True if the site has a collaborative query/key projection."""
        return is_swapped(self.module)

    @property
    def query_key(self) -> QueryKey | None:
        """The collaborative query/key projection; None if the site has none."""
        return cast(QueryKey, self.module.query_key) if self.is_swapped else None

    @property
    def projections(self) -> tuple[Projection, Projection]:
        """The query and key projections of a site that is not collaborative."""
        return self.adapter.projections(self.module)

    @property
    def value(self) -> Projection:
        """The value projection; a Linear of its own where the site is collaborative."""
        return self.adapter.value_projection(self.module)

    @cached_property
    def output(self) -> nn.Module:
        """The output projection; looked up on first use, since not every adapter knows where it is."""
        return self.adapter.output_projection(self.model, self.site)

    def read(self) -> AttentionWeights:
        """Return the weights of a site that is not collaborative, per head, without copying."""
        return self.adapter.read(self.module)

    @property
    def query_key_width(self) -> int:
        """The width of the query/key projection over all heads: H * d_k, or R of a collaborative site."""
        return self.projections[0].out_features if self.query_key is None else self.query_key.state.dim

    @property
    def dim_value(self) -> int:
        """The width of the values over all key/value heads: H_k * d_v."""
        return self.value.out_features

    @property
    def value_width(self) -> int:
        """The width of a value head: d_v."""
        return widths(self.output)[0] // self.adapter.num_heads(self.module)

    @property
    def groups(self) -> tuple[int, ...]:
        """The key/value head of every head; its own index where each has its own."""
        return tuple(range(self.num_heads)) if self.site.groups is None else self.site.groups

    def output_weight(self) -> Tensor:
        """Return W_O as it applies in evaluation, gates and alphas included: [D, H * d_v]."""
        return dense_weight(self.output)


def open_sites(
    model: PreTrainedModel, adapter: AttentionAdapter, sites: Iterable[AttentionSite] | None = None
) -> list[OpenSite]:
    """Open the given sites of a model or, without `sites`, all that have heads, in model order."""
    states, base = CollabConfig.on(model).sites, model.base_model
    return [
        OpenSite(site, base.get_submodule(site.path), adapter, model, tuple(kept_heads(states, site)))
        for site in (adapter.sites_with_heads(model) if sites is None else sites)
    ]
