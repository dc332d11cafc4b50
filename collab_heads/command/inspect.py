"""The facts that `collab-heads inspect` shows: for people (`str`) and for machines (`to_dict`)."""

import dataclasses
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from collab_heads.base.display import text_table
from collab_heads.command.inputs import class_of
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import adapter_for_config, supported_model_types
from collab_heads.errors import DataError, NonFiniteError
from collab_heads.layers.gates import HeadGates
from collab_heads.layers.output import gates_of
from collab_heads.model.loading import explaining, load_or_explain
from collab_heads.model.open_feed_forward import OpenFeedForward, open_feed_forwards
from collab_heads.model.open_site import OpenSite, open_sites
from collab_heads.model.site_size import FeedForwardGeometry, site_size, size_of
from collab_heads.model.ties import check_stored
from collab_heads.sites.record import CollabConfig


@dataclass(frozen=True)
class FamilyFacts:
    """The facts about a type of model: the roles of its attention, and what the toolkit can do with it.

    Attributes:
        model_type: as its config names it.
        adapter: name of the adapter's class.
        roles: the roles that its attention can have.
        capabilities: the operations that the toolkit supports.
        why_not: unsupported operation -> the reason.
    """

    model_type: str
    adapter: str
    roles: Sequence[str]
    capabilities: Sequence[str]
    why_not: Mapping[str, str]

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.model_type}: {self.adapter}, {', '.join(self.roles)}",
            f"can: {', '.join(self.capabilities) or 'nothing'}",
            *(f"cannot: {name}: {why}" for name, why in self.why_not.items()),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class FamilyList:
    """The facts about all types of models.

    Attributes:
        families: one per type.
    """

    families: Sequence[FamilyFacts]

    def to_dict(self) -> dict:
        """Return the facts by model type."""
        return {each.model_type: each.to_dict() for each in self.families}

    def __str__(self) -> str:
        rows = [(each.model_type, ", ".join(each.roles), ", ".join(each.capabilities)) for each in self.families]
        return text_table(("model type", "roles", "can"), rows, f"{len(rows)} types; what cannot: inspect TYPE")


@dataclass(frozen=True)
class SiteFacts:
    """The facts about one attention module.

    Attributes:
        path, role, layer: the site.
        kind: the kind of its query/key projection; "stock" for that of the family.
        heads: the number of its heads.
        heads_before: the number of its heads before any was removed.
        key_heads: the number of key/value heads.
        kept: the original numbers of its heads.
        query_key: width of its queries and keys, over all heads.
        value: width of its values, over all key/value heads.
        gates: the kind of its gates; None if it has none.
        open: the original numbers of heads whose gates are open; None without gates, or if their weights are not in a
            local folder.
        alphas: whether its heads are mixed.
        parameters: of its four projections.
        cache: elements cached per token; 0 outside of decoders.
    """

    path: str
    role: str
    layer: int
    kind: str
    heads: int
    heads_before: int
    key_heads: int
    kept: Sequence[int]
    query_key: int
    value: int
    gates: str | None
    open: Sequence[int] | None
    alphas: bool
    parameters: int
    cache: int

    def row(self) -> tuple[str, ...]:
        """Return the site's row of the table."""
        heads = str(self.heads) if self.heads == self.heads_before else f"{self.heads} of {self.heads_before}"
        gates = self.gates or ""
        if self.open is not None:
            gates += f", {len(self.open)} open"
        changes = ", ".join(filter(None, (f"gates ({gates})" if gates else "", "alphas" if self.alphas else "")))
        numbers = self.key_heads, self.query_key, self.value, f"{self.parameters:,}", self.cache or "-"
        return self.role, self.path, self.kind, heads, *map(str, numbers), changes or "-"


@dataclass(frozen=True)
class BlockFacts:
    """The facts about one feed-forward block.

    Attributes:
        path, role, layer: the block.
        neurons: the number of its neurons.
        neurons_before: the number of its neurons before any was removed.
        parameters: of its projections.
    """

    path: str
    role: str
    layer: int
    neurons: int
    neurons_before: int
    parameters: int

    def row(self) -> tuple[str, ...]:
        """Return the block's row of the table."""
        is_whole = self.neurons == self.neurons_before
        neurons = str(self.neurons) if is_whole else f"{self.neurons} of {self.neurons_before}"
        return self.role, self.path, neurons, f"{self.parameters:,}"


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model.

    Attributes:
        model: its name or folder.
        model_class: name of its class.
        family: the facts about its type.
        sites: its attention modules, in order.
        blocks: its feed-forward blocks, in order; none if the adapter does not say where they are.
        parameters: of the whole model.
    """

    model: str
    model_class: str
    family: FamilyFacts
    sites: Sequence[SiteFacts]
    blocks: Sequence[BlockFacts]
    parameters: int

    @property
    def totals(self) -> dict[str, int]:
        """Return sums over sites (heads, parameters, elements cached per token) and over feed-forward blocks."""
        names = ("heads", "heads_before", "parameters", "cache")
        found = {name: sum(getattr(site, name) for site in self.sites) for name in names}
        found |= {name: sum(getattr(block, name) for block in self.blocks) for name in ("neurons", "neurons_before")}
        return found | {"feed_forward": sum(block.parameters for block in self.blocks)}

    def to_dict(self) -> dict:
        """Return the facts and the totals."""
        return {**dataclasses.asdict(self), "totals": self.totals}

    def __str__(self) -> str:
        header = ("role", "site", "kind", "heads", "key heads", "query/key", "value", "parameters", "cache", "on heads")
        totals, share = self.totals, self.totals["parameters"] / self.parameters
        heads = f"{totals['heads']} heads" + (
            f" of {totals['heads_before']}" if totals["heads"] < totals["heads_before"] else ""
        )
        cache = f", {totals['cache']:,} elements cached per token" if totals["cache"] else ""
        last = f"{heads}, {totals['parameters']:,} parameters of attention ({share:.0%} of {self.parameters:,}){cache}"
        table = text_table(header, [site.row() for site in self.sites], last)
        return f"{self.model}: {self.model_class}\n{self.family}\n\n{table}" + self.table_of_blocks()

    def table_of_blocks(self) -> str:
        """Return the table of the feed-forward blocks, if there are any."""
        if not self.blocks:
            return ""
        neurons, before, count = (self.totals[name] for name in ("neurons", "neurons_before", "feed_forward"))
        last = f"{neurons:,} neurons" + (f" of {before:,}" if neurons < before else "")
        last += f", {count:,} parameters of feed-forward blocks ({count / self.parameters:.0%})"
        return "\n\n" + text_table(
            ("role", "block", "neurons", "parameters"), [block.row() for block in self.blocks], last
        )


def run(args: Namespace) -> ModelFacts | FamilyFacts | FamilyList:
    """Collect the facts that the flags ask for, print and return them."""
    found = look(args)
    print(found)
    return found


def look(args: Namespace) -> ModelFacts | FamilyFacts | FamilyList:
    """Return the facts about a model, about a type of model, or about all types, as the flags say."""
    if args.model is None:
        return FamilyList(tuple(map(facts_of_type, supported_model_types())))
    if args.model in CONFIG_MAPPING and not os.path.exists(args.model):
        return facts_of_type(args.model)
    config = load_or_explain(AutoConfig, args.model, trust_remote_code=args.trust_remote_code)
    return facts_of_model(args.model, config)


def facts_of_type(model_type: str) -> FamilyFacts:
    return family(adapter_for_config(AutoConfig.for_model(model_type)), model_type)


def family(adapter: AttentionAdapter, model_type: str) -> FamilyFacts:
    """Return the facts that an adapter states about its models."""
    return FamilyFacts(
        model_type,
        adapter=type(adapter).__name__,
        roles=adapter.roles,
        capabilities=tuple(sorted(adapter.capabilities)),
        why_not={str(name): why for name, why in adapter.why_not.items()},
    )


def facts_of_model(name: str, config: PretrainedConfig) -> ModelFacts:
    """Return the facts about a model, built without memory for its weights and changed as its config records."""
    adapter = adapter_for_config(config)
    check_stored(config, Path(name))
    named = class_of(config)
    with explaining(named.__name__, name):
        model = empty_model(config, named)
    adapter = adapter.variant(model.config)
    gates = stored_gates(model, Path(name))
    sites = [facts_of_site(site, gates) for site in open_sites(model, adapter, adapter.sites(model))]
    blocks = tuple(map(facts_of_block, open_feed_forwards(model, adapter)))
    return ModelFacts(
        name,
        type(model).__name__,
        family(adapter, config.model_type),
        tuple(sites),
        blocks,
        parameters=model.num_parameters(),
    )


def empty_model(config: PretrainedConfig, named: Any) -> PreTrainedModel:
    """Build the model that a config describes, of class `named`, on the meta device."""
    with torch.device("meta"):
        return cast(PreTrainedModel, AutoModel.from_config(config) if named is AutoModel else named(config))


def facts_of_site(site: OpenSite, gates: Mapping[str, Tensor]) -> SiteFacts:
    state = CollabConfig.on(site.model).site(site.site)
    size, empty = site_size(site), not site.num_heads
    return SiteFacts(
        site.path,
        site.role,
        layer=site.site.layer,
        kind="stock" if state.query_key is None else state.query_key.kind,
        heads=site.num_heads,
        heads_before=state.num_heads,
        key_heads=site.site.num_key_heads,
        kept=site.head_numbers,
        query_key=0 if empty else site.query_key_width,
        value=0 if empty else site.dim_value,
        gates=None if state.gates is None else state.gates.kind,
        open=open_heads(site, gates),
        alphas=state.alphas,
        parameters=size.parameters,
        cache=size.cache if site.role.startswith("dec") else 0,
    )


def facts_of_block(block: OpenFeedForward) -> BlockFacts:
    state, size = CollabConfig.on(block.model).site(block.site), size_of(FeedForwardGeometry.of(block))
    return BlockFacts(
        block.path, block.role, block.site.layer, block.num_neurons, state.num_neurons, parameters=size.parameters
    )


def stored_gates(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """Return the gate tensors that a folder stores, by name; a name on the Hub has none."""
    found: dict[str, Tensor] = {}
    if any(isinstance(module, HeadGates) for module in model.modules()):
        for file in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as tensors:
                    found |= {name: tensors.get_tensor(name) for name in tensors.keys() if ".gates." in name}
            except (OSError, SafetensorError) as error:
                raise DataError(f"{file} holds no weights, or is damaged: {error}") from error
    return found


def open_heads(site: OpenSite, stored: Mapping[str, Tensor]) -> tuple[int, ...] | None:
    """Return the original numbers of the heads whose gates are open; None without gates, or without their weights.

    Raises:
        DataError: if the stored tensors are not gates of this site.
        NonFiniteError: if a gate is NaN or infinite.
    """
    gates = gates_of(site.output) if site.num_heads else None
    if gates is None:
        return None
    path = next(path for path, module in site.model.named_modules() if module is gates)
    mine = {name.removeprefix(f"{path}."): tensor for name, tensor in stored.items() if name.startswith(f"{path}.")}
    if not mine:
        return None
    try:
        gates.to_empty(device="cpu").load_state_dict(mine)
    except RuntimeError as error:
        raise DataError(f"{site.path}: what is stored are gates of something else: {error!s:.300}") from error
    if not all(torch.isfinite(each).all() for each in mine.values()):
        raise NonFiniteError(f"{site.path}: its gates contain NaN or inf: take an earlier checkpoint of its training")
    return tuple(site.head_numbers[i] for i in gates.is_open().nonzero().flatten().tolist())
