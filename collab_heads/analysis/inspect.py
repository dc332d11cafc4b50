"""inspect: the facts about a model, in memory or in a folder, and about types of models."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from collab_heads.analysis.facts import BlockFacts, FamilyFacts, FamilyList, ModelFacts, SiteFacts
from collab_heads.base.arguments import checking_arguments
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import adapter_for_config, supported_model_types
from collab_heads.errors import DataError, NonFiniteError
from collab_heads.heads.alpha import report_alphas
from collab_heads.heads.gating import report_gates
from collab_heads.layers.output import alphas_of, gates_of
from collab_heads.model.open_layers import OpenFeedForward, OpenLayers, OpenSite
from collab_heads.model.opened import opened
from collab_heads.model.site_size import FeedForwardGeometry, site_size, size_of
from collab_heads.saving.loading import class_of, explaining, load_or_explain
from collab_heads.saving.ties import check_stored
from collab_heads.sites.record import trimmed_vocabulary


@checking_arguments
def inspect(model: PreTrainedModel | str | Path, *, trust_remote_code: bool = False) -> ModelFacts:
    """Return what a model is made of now: heads, widths, neurons, gates and alphas, site by site; nothing is measured.

    Examples:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
        >>> _ = swap_to_gated(model, alive_heads={"enc-self": [[1, 0, 1, 0], [0, 1, 0, 0]]})
        >>> [site.open for site in inspect(model).gates.sites]
        [(0, 2), (1,)]

    Args:
        model: a supported transformers model, original or changed. Or a folder or a name on the Hub: its config is read
            and, from a folder, gates and alphas, without memory for other weights.
        trust_remote_code: as in `from_pretrained`.

    Returns:
        The facts, with sums, and the reports on gates and alphas; `print` it.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, or it is wrapped.
        LoadError: if there is no such model, or its config is damaged.
        DataError: if the stored gates or alphas are damaged, or those of something else.
        NonFiniteError: if gates or alphas contain NaN or inf; the site is named.
    """
    if isinstance(model, str | Path):
        config = load_or_explain(AutoConfig, str(model), trust_remote_code=trust_remote_code)
        return facts_of_stored(str(model), config)
    with opened(model, of="layers") as layers:
        return facts_of(layers, model.config.name_or_path or model.config.model_type)


def look(name: str | None, *, trust_remote_code: bool) -> ModelFacts | FamilyFacts | FamilyList:
    """Return the facts about a stored model, about a type of models, such as "bert", or about all types (None)."""
    if name is None:
        return FamilyList(tuple(map(facts_of_type, supported_model_types())))
    if name in CONFIG_MAPPING and not os.path.exists(name):
        return facts_of_type(name)
    return inspect(name, trust_remote_code=trust_remote_code)


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


def facts_of_stored(name: str, config: PretrainedConfig) -> ModelFacts:
    """Return the facts about a model, built without memory for its weights and changed as its config records."""
    adapter = adapter_for_config(config)
    check_stored(config, Path(name))
    named = class_of(config)
    with explaining(named.__name__, name):
        model = empty_model(config, named)
    layers = OpenLayers.of(model, adapter.variant(model.config))
    load_gates_and_alphas(layers, Path(name))
    return facts_of(layers, name)


def facts_of(layers: OpenLayers, name: str) -> ModelFacts:
    model, gates = layers.model, report_gates(layers)
    opened_heads = {site.path: site.open for site in gates.sites}
    return ModelFacts(
        name,
        type(model).__name__,
        family(layers.adapter, model.config.model_type),
        tuple(facts_of_site(site, opened_heads.get(site.path)) for site in layers.attention),
        tuple(map(facts_of_block, layers.feed_forwards)),
        gates,
        report_alphas(layers),
        parameters=model.num_parameters(),
        vocabulary=trimmed_vocabulary(model.config),
    )


def empty_model(config: PretrainedConfig, named: Any) -> PreTrainedModel:
    """Build the model that a config describes, of class `named`, on the meta device."""
    with torch.device("meta"):
        return cast(PreTrainedModel, AutoModel.from_config(config) if named is AutoModel else named(config))


def facts_of_site(site: OpenSite, open_heads: tuple[int, ...] | None) -> SiteFacts:
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
        open=open_heads,
        alphas=state.alphas,
        parameters=size.parameters,
        cache=size.cache * site.site.is_cached,
    )


def facts_of_block(block: OpenFeedForward) -> BlockFacts:
    state, size = block.state, size_of(FeedForwardGeometry.of(block))
    return BlockFacts(
        block.path, block.role, block.site.layer, block.num_neurons, state.num_neurons, parameters=size.parameters
    )


def load_gates_and_alphas(layers: OpenLayers, folder: Path) -> None:
    """Load what a folder stores of gates and alphas into a model without weights; a name on the Hub stores none."""
    paths = {module: path for path, module in layers.model.named_modules()}
    wanted = {
        paths[module]: site
        for site in layers.attention
        if site.num_heads
        for module in (gates_of(site.output), alphas_of(site.output))
        if module is not None
    }
    stored = stored_under(wanted, folder) if wanted else {}
    for path, site in wanted.items():
        mine = {name.removeprefix(f"{path}."): each for name, each in stored.items() if name.startswith(f"{path}.")}
        if not mine:
            continue
        module = layers.model.get_submodule(path)
        what = "gates" if module is gates_of(site.output) else "alphas"
        try:
            module.to_empty(device="cpu").load_state_dict(mine)
        except RuntimeError as error:
            raise DataError(f"{site.path}: what is stored are {what} of something else: {error!s:.300}") from error
        if not all(torch.isfinite(each).all() for each in mine.values()):
            raise NonFiniteError(
                f"{site.path}: its {what} contain NaN or inf: take an earlier checkpoint of its training"
            )


def stored_under(paths: Collection[str], folder: Path) -> dict[str, Tensor]:
    """Return the tensors in the safetensors of a folder that belong to modules at these paths, by name."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                names = [name for name in tensors.keys() if name.rpartition(".")[0] in paths]
                found |= {name: tensors.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise DataError(f"{file} holds no weights, or is damaged: {error}") from error
    return found
