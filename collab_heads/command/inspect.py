"""`collab-heads inspect`: collect the facts about a model, without memory for its weights, or about types of models."""

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from collab_heads.command.facts import BlockFacts, FamilyFacts, FamilyList, ModelFacts, SiteFacts
from collab_heads.command.inputs import class_of
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import adapter_for_config, supported_model_types
from collab_heads.errors import DataError, NonFiniteError
from collab_heads.layers.gates import HeadGates
from collab_heads.layers.output import gates_of
from collab_heads.model.open_layers import OpenFeedForward, OpenLayers, OpenSite
from collab_heads.model.site_size import FeedForwardGeometry, site_size, size_of
from collab_heads.saving.loading import explaining, load_or_explain
from collab_heads.saving.ties import check_stored
from collab_heads.sites.record import trimmed_vocabulary


def run_inspect(args: Namespace) -> ModelFacts | FamilyFacts | FamilyList:
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
    gates, layers = stored_gates(model, Path(name)), OpenLayers.of(model, adapter)
    sites = [facts_of_site(site, gates) for site in layers.attention]
    blocks = tuple(map(facts_of_block, layers.feed_forwards))
    return ModelFacts(
        name,
        type(model).__name__,
        family(adapter, config.model_type),
        tuple(sites),
        blocks,
        parameters=model.num_parameters(),
        vocabulary=trimmed_vocabulary(config),
    )


def empty_model(config: PretrainedConfig, named: Any) -> PreTrainedModel:
    """Build the model that a config describes, of class `named`, on the meta device."""
    with torch.device("meta"):
        return cast(PreTrainedModel, AutoModel.from_config(config) if named is AutoModel else named(config))


def facts_of_site(site: OpenSite, gates: Mapping[str, Tensor]) -> SiteFacts:
    state, size, empty = site.state, site_size(site), not site.num_heads
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
    state, size = block.state, size_of(FeedForwardGeometry.of(block))
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
    """Return the original numbers of the heads whose gates are open; None without gates, or without their weights."""
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
