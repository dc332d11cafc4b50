"""The layers of a model, opened once: its sites of attention and its feed-forward blocks, with their modules."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeAlias, cast

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from collab_heads.base.option_values import FeedForwardRole, TableRole
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.feed_forward import feed_forward_blocks
from collab_heads.errors import ArgumentError
from collab_heads.layers.fused import Projection
from collab_heads.layers.layout import PLAIN, weight_of, widths
from collab_heads.layers.output import dense_weight
from collab_heads.layers.query_key import QueryKey, is_swapped
from collab_heads.layers.weight_grid import BLOCK
from collab_heads.sites.record import CollabConfig
from collab_heads.sites.site import AttentionSite, AttentionWeights, FeedForwardSite, Role
from collab_heads.sites.state import FeedForwardState, SiteState


@dataclass(frozen=True, eq=False)
class OpenSite:
    """A site of attention in a model: its modules, and the adapter that reads them.

    Modules change their class in place, so an open site stays valid while its model is changed. `site` and `state`
    describe the site at the time when it was opened.

    Attributes:
        site: path, role, layer and number of heads.
        module: the attention module.
        adapter: the adapter of the model's family.
        model: the model that the site belongs to.
        state: its recorded state.
    """

    site: AttentionSite
    module: nn.Module
    adapter: AttentionAdapter
    model: PreTrainedModel
    state: SiteState

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
    def head_numbers(self) -> tuple[int, ...]:
        """The numbers that its heads had before any was removed."""
        return tuple(self.state.head_numbers)

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

    def now(self, state: SiteState) -> "OpenSite":
        """Describe the site as it is now, in a state."""
        heads, groups = self.adapter.num_heads(self.module), self.adapter.groups(self.module)
        return replace(self, site=replace(self.site, num_heads=heads, groups=groups), state=state)

    def with_copies(self, copies: Mapping[nn.Module, nn.Module]) -> "OpenSite":
        """Return the site bound to the copies of its modules, where there are some."""
        found = replace(self, module=copies.get(self.module, self.module))
        if "output" in vars(self):
            vars(found)["output"] = copies.get(self.output, self.output)
        return found


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
        state: its recorded state.
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
    state: FeedForwardState

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

    def now(self, state: FeedForwardState) -> "OpenFeedForward":
        """Describe the block as it is now, in a state."""
        return replace(self, site=replace(self.site, num_neurons=self.num_neurons), state=state)

    def with_copies(self, copies: Mapping[nn.Module, nn.Module]) -> "OpenFeedForward":
        """Return the block bound to the copies of its projections, where there are some."""
        first = tuple(copies.get(each, each) for each in self.first)
        return replace(self, first=first, output=copies.get(self.output, self.output))


OpenLayerSite: TypeAlias = OpenSite | OpenFeedForward


@dataclass(frozen=True, eq=False)
class OpenTable:
    """A weight [V, D] outside of the sites: embeddings, which may also be the output layer, or another linear layer.

    Attributes:
        path: the path of its first module in the model.
        modules: the modules that share the weight: embeddings, and output layers that are tied to them.
    """

    path: str
    modules: tuple[nn.Module, ...]
    state: ClassVar[None] = None

    @property
    def role(self) -> TableRole:
        return "embedding" if isinstance(self.output, nn.Embedding) else "linear"

    @property
    def output(self) -> nn.Module:
        """Its first module."""
        return self.modules[0]

    def with_copies(self, copies: Mapping[nn.Module, nn.Module]) -> "OpenTable":
        """Return the table bound to the copies of its modules, where there are some."""
        return replace(self, modules=tuple(copies.get(each, each) for each in self.modules))


OpenPart: TypeAlias = OpenLayerSite | OpenTable


def tables_in(model: PreTrainedModel, sites: Iterable[OpenLayerSite]) -> list[OpenTable]:
    """Return the embeddings of a model, those of positions included, and its linear layers outside of some sites.

    Embeddings that are computed (sinusoids) are left out, and what is narrower than a block of a grid.
    """
    inside = {part for site in sites for module in modules_of(site) for part in module.modules()}
    shared: dict[int, dict[nn.Module, str]] = {}
    stacks = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    read = {input_embeddings(stack) for stack in stacks}
    for name, module in model.named_modules():
        if module in inside or not (module in read or type(module) is nn.Embedding or isinstance(module, PLAIN)):
            continue
        if min(weight_of(module).shape[1:]) >= BLOCK:
            shared.setdefault(id(module.weight), {})[module] = name
    return [OpenTable(next(iter(names.values())), tuple(names)) for names in shared.values()]


def input_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """Return the embeddings of the inputs of a model; None where it reads no ids."""
    try:
        found = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return found if isinstance(found, nn.Embedding) else None


@dataclass(eq=False)
class OpenLayers:
    """The opened layers of a model. They stay current: `write` describes the sites that it changes anew.

    Attributes:
        model: the model.
        adapter: the adapter of its family.
        record: the states of its sites.
        attention: all its sites of attention, in model order, also those that have lost all heads.
    """

    model: PreTrainedModel
    adapter: AttentionAdapter
    record: CollabConfig
    attention: list[OpenSite]

    @classmethod
    def of(cls, model: PreTrainedModel, adapter: AttentionAdapter) -> "OpenLayers":
        """Bind the sites of a model to their modules. Nothing is checked: see `opened`."""
        record, base = CollabConfig.on(model), model.base_model
        sites = adapter.sites(model)
        opened = [OpenSite(each, base.get_submodule(each.path), adapter, model, record.site(each)) for each in sites]
        return cls(model, adapter, record, opened)

    @cached_property
    def feed_forwards(self) -> list[OpenFeedForward]:
        """All feed-forward blocks, in model order, with neurons or without; none where the adapter names none."""
        found, sites = [], [site.site for site in self.attention]
        for site, names in feed_forward_blocks(self.model, self.adapter.feed_forwards, sites):
            block = self.model.base_model.get_submodule(site.path)
            first, last = tuple(block.get_submodule(name) for name in names.first), block.get_submodule(names.last)
            activation = None if names.activation is None else block.get_submodule(names.activation)
            modules = (block, first, last, activation, 2 if names.fused else len(first), names.entry)
            found.append(OpenFeedForward(site, *modules, self.adapter, self.model, self.record.site(site)))
        return found

    @cached_property
    def tables(self) -> list[OpenTable]:
        """The weights outside of the sites that may have few bits."""
        return tables_in(self.model, [*self.attention, *self.feed_forwards])

    @property
    def with_heads(self) -> list[OpenSite]:
        """The sites of attention that have heads, in model order."""
        return [site for site in self.attention if site.num_heads]

    @property
    def in_order(self) -> list[OpenLayerSite]:
        """The sites of attention that have heads, and all feed-forward blocks, in model order."""
        places = {module: place for place, module in enumerate(self.model.base_model.modules())}
        sites: list[OpenLayerSite] = [*self.with_heads, *self.feed_forwards]
        return sorted(sites, key=lambda site: places[site.module if isinstance(site, OpenSite) else site.output])

    def at(self, path: str) -> Any:
        """Return the site with a path."""
        (found,) = self.named([path])
        return found

    def named(self, paths: Iterable[str]) -> list[Any]:
        """Return the sites, or tables, with some paths, of attention first, in model order."""
        wanted = set(paths)
        sites: list[Any] = [*self.attention, *self.feed_forwards]
        found = [site for site in sites if site.path in wanted]
        return found if len(found) == len(wanted) else [*found, *(each for each in self.tables if each.path in wanted)]

    def write(self, states: Mapping[str, Any]) -> None:
        """Record new states of sites, path -> state, in the modules and configs of the model."""
        record = self.record.with_sites(states)
        record.write(self.model, before=self.record)
        self.record = record
        self.attention = [described(site, record) if site.path in states else site for site in self.attention]
        if "feed_forwards" in vars(self):
            self.feed_forwards = [
                described(block, record) if block.path in states else block for block in self.feed_forwards
            ]

    def with_copies(self, copies: Mapping[nn.Module, nn.Module]) -> "OpenLayers":
        """Return the same layers bound to copies of some of their modules, which stand in for them in the model."""
        found = OpenLayers(self.model, self.adapter, self.record, [site.with_copies(copies) for site in self.attention])
        if "feed_forwards" in vars(self):
            found.feed_forwards = [block.with_copies(copies) for block in self.feed_forwards]
        if "tables" in vars(self):
            found.tables = [table.with_copies(copies) for table in self.tables]
        return found


def described(site: Any, record: CollabConfig) -> Any:
    """Describe a site as it is now, by a record that holds its state, unless it is stock again."""
    now = site.now(site.state)
    return replace(now, state=record.site(now.site))


def modules_of(site: OpenLayerSite) -> list[nn.Module]:
    """Return the modules of a site; only the attention module if the adapter does not know the output projection."""
    try:
        return list(site.modules)
    except ArgumentError:
        return [site.module] if isinstance(site, OpenSite) else []


def counted_together(blocks: Iterable[OpenFeedForward]) -> list[list[OpenFeedForward]]:
    """Group feed-forward blocks whose neurons one config entry counts in stock models."""
    groups: dict[tuple, list[OpenFeedForward]] = {}
    for block in blocks:
        groups.setdefault((type(block.config), block.config.model_type, block.entry), []).append(block)
    return [*groups.values()]
