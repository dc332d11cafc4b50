"""Open feed-forward blocks: sites together with their modules, and with those of attention the layers of a model."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from collab_heads.base.option_values import FeedForwardRole
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.feed_forward import feed_forward_blocks
from collab_heads.layers.layout import widths
from collab_heads.model.open_site import OpenSite, open_sites
from collab_heads.sites.site import FeedForwardSite


@dataclass(frozen=True, eq=False)
class OpenFeedForward:
    """A feed-forward block in a model: its modules, which stay while their weights change.

    Attributes:
        site: path, role, layer and number of neurons at the time when it was opened.
        block: the module that holds its parts; in some families that is the whole layer.
        first: the projections that make the neurons.
        output: the last projection, which reads the neurons.
        activation: the module of the activation; None where it is the function GELU.
        branches: the values that make a neuron: 2 where the block is gated, else 1.
        entry: the config entry for the number of neurons.
        adapter: the adapter of the model's family.
        model: the model that the block belongs to.
    """

    site: FeedForwardSite
    block: nn.Module
    first: tuple[nn.Module, ...]
    output: nn.Module
    activation: nn.Module | None
    branches: int
    entry: str
    adapter: AttentionAdapter
    model: PreTrainedModel

    @property
    def path(self) -> str:
        """The dotted path of the module that holds the parts of the block, relative to the base model."""
        return self.site.path

    @property
    def role(self) -> FeedForwardRole:
        """One of `FEED_FORWARD_ROLES`."""
        return self.site.role

    @property
    def config(self) -> PretrainedConfig:
        """The config of the innermost model that the block is in."""
        parts, base = self.path.split("."), self.model.base_model
        around = [base.get_submodule(".".join(parts[:count])) for count in range(len(parts), -1, -1)]
        return next(module.config for module in around if isinstance(module, PreTrainedModel))

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that change with the number of neurons."""
        return (*self.first, self.output)

    @property
    def token_modules(self) -> tuple[nn.Module, nn.Module]:
        """The modules that see the tokens that the block reads, and those that it writes: the same ones."""
        return self.first[0], self.output

    @property
    def num_neurons(self) -> int:
        """The number of neurons that the block has now."""
        return widths(self.output)[0]

    @property
    def parts(self) -> int:
        """The number of branches that each first projection makes, one below the other."""
        return self.branches // len(self.first)

    def neurons(self, states: Tensor) -> Tensor:
        """Return what the last projection reads, without dropout: [..., D] -> [..., F]."""
        made = [part for first in self.first for part in first(states).chunk(self.parts, -1)]
        activated = F.gelu(made[0]) if self.activation is None else self.activation(made[0])
        return activated if self.branches == 1 else activated * made[1]


OpenLayerSite: TypeAlias = OpenSite | OpenFeedForward
AnyOpenSite = TypeVar("AnyOpenSite", OpenSite, OpenFeedForward, OpenLayerSite)


def open_feed_forwards(model: PreTrainedModel, adapter: AttentionAdapter) -> list[OpenFeedForward]:
    """Open all feed-forward blocks of a model, in model order, with neurons or without."""
    found = []
    for site, names in feed_forward_blocks(model, adapter.feed_forwards, adapter.sites(model)):
        block = model.base_model.get_submodule(site.path)
        first, last = tuple(block.get_submodule(name) for name in names.first), block.get_submodule(names.last)
        activation = None if names.activation is None else block.get_submodule(names.activation)
        branches = 2 if names.fused else len(first)
        found.append(OpenFeedForward(site, block, first, last, activation, branches, names.entry, adapter, model))
    return found


def counted_together(blocks: Iterable[OpenFeedForward]) -> list[list[OpenFeedForward]]:
    """Group feed-forward blocks whose neurons one config entry counts in stock models."""
    groups: dict[tuple, list[OpenFeedForward]] = {}
    for block in blocks:
        groups.setdefault((type(block.config), block.config.model_type, block.entry), []).append(block)
    return [*groups.values()]


def open_layers(model: PreTrainedModel, adapter: AttentionAdapter) -> list[OpenLayerSite]:
    """Open all sites of attention that have heads, and all feed-forward blocks, in model order."""
    return in_model_order(model, [*open_sites(model, adapter), *open_feed_forwards(model, adapter)])


def in_model_order(model: PreTrainedModel, sites: Iterable[OpenLayerSite]) -> list[OpenLayerSite]:
    """Sort sites by the places of their modules in a model."""
    places = {module: place for place, module in enumerate(model.base_model.modules())}
    return sorted(sites, key=lambda site: places[site.module if isinstance(site, OpenSite) else site.output])


def reopened(site: AnyOpenSite) -> AnyOpenSite:
    """Open a site again, in its current state."""
    model, adapter = site.model, site.adapter
    sites = open_sites(model, adapter, adapter.sites(model)) if isinstance(site, OpenSite) else None
    found = open_feed_forwards(model, adapter) if sites is None else sites
    (now,) = [each for each in found if each.path == site.path]
    return now
