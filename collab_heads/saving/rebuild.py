"""Bring a freshly built model to the state that its config records."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from collab_heads.base.checks import is_index, is_list
from collab_heads.contract.registry import adapter_for_config, known_adapter
from collab_heads.errors import ConfigError
from collab_heads.layers.query_key_kinds import EXACT_KIND
from collab_heads.model.apply_state import apply_feed_forward, apply_state
from collab_heads.model.open_layers import OpenFeedForward, OpenLayers, OpenSite
from collab_heads.saving.layer_configs import DIGITS, record_sizes
from collab_heads.sites.record import FIELD, STATE, CollabConfig
from collab_heads.sites.site import kept_groups
from collab_heads.sites.state import DIVIDED, FeedForwardState, QueryKeyKind, SiteState, expect

PRUNED = "pruned_heads"  # entry in the configs of transformers 4


def rebuild(model: PreTrainedModel) -> None:
    """Give a freshly built model the sites that its config records. Idempotent; works on the meta device.

    Recorded sites of a stack that this model lacks are skipped (such as the encoder of an encoder-decoder). So are
    models that only hold changed ones, each with a config of its own, which rebuild themselves (`EncoderDecoderModel`).

    Raises:
        ConfigError: if the record does not fit the model; the site is named.
        UnsupportedModelError: if no adapter is registered for the model type.
    """
    take_pruned_heads(model)
    record_sizes(model)
    record = CollabConfig.of(model.config)
    if not record.states or (known_adapter(model.config) is None and not hasattr(model.config, FIELD)):
        return
    adapter = adapter_for_config(model.config)
    stacks = {name for name, _ in model.base_model.named_children()}
    layers = OpenLayers.of(model, adapter)
    sites = {site.path: site for site in layers.attention}
    blocks = {block.path: block for block in layers.feed_forwards} if record.feed_forwards else {}
    for path, state in record.states.items():
        if not adapter.knows(path, state):
            what = "site of attention" if isinstance(state, SiteState) else "feed-forward block"
            raise ConfigError(f"config.{FIELD}: {path!r} is not a {what} in a {model.config.model_type}")
        if path.split(".")[0] not in stacks:
            continue
        if path not in sites and path not in blocks:
            raise ConfigError(
                f"config.{FIELD} records {path!r}, which this {type(model).__name__} does not have; "
                f"it has {', '.join((*sites, *blocks)) or 'no sites'}"
            )
        if isinstance(state, SiteState):
            rebuild_site(sites[path], state)
        else:
            rebuild_feed_forward(blocks[path], state)


def take_pruned_heads(model: PreTrainedModel) -> None:
    """Turn the `pruned_heads` of a config that transformers 4 wrote into our record: layer -> heads that were removed.

    Such a model had one stack, of which the self-attention was pruned; transformers 5 knows no such entry.

    Raises:
        ConfigError: if the entry does not fit the model, or the config has our record, too.
    """
    pruned, adapter = getattr(model.config, PRUNED, None), known_adapter(model.config)
    if not pruned or adapter is None:
        return
    adapter = adapter.variant(model.config)
    sites = [site for site in adapter.sites(model) if site.role != "dec-enc"]
    for condition, wanted in (
        (not hasattr(model.config, FIELD), f"none beside config.{FIELD}: take one of the two out"),
        (not model.config.is_encoder_decoder and "prune" in adapter.capabilities, "none in this family"),
        (isinstance(pruned, Mapping), "a layer -> a list of its heads"),
    ):
        expect(condition, f"config.{PRUNED}", pruned, wanted)
    states: dict[str, SiteState | FeedForwardState] = {}
    for layer, heads in pruned.items():
        number = int(layer) if str(layer).isdecimal() and len(str(layer)) <= DIGITS else -1
        expect(is_index(number, len(sites)), f"a layer in config.{PRUNED}", layer, f"one from 0 to {len(sites) - 1}")
        site, where = sites[number], f"config.{PRUNED} of layer {number}"
        valid = is_list(heads) and all(is_index(head, site.num_heads) for head in heads)
        expect(valid, where, heads, f"some of the heads 0 to {site.num_heads - 1}")
        if heads:
            kept = tuple(head for head in range(site.num_heads) if head not in heads)
            states[site.path] = SiteState(site.role, site.num_heads, kept=kept)
    delattr(model.config, PRUNED)
    if states:
        setattr(model.config, FIELD, CollabConfig(states).to_dict())


def catch_up(model: PreTrainedModel, record: Mapping | None) -> None:
    """Bring a model in use to the recorded state of a model that was changed further, for example on another process.

    Only the structure follows (heads, projections, values, gates, alphas, neurons); copy the weights yourself.

    Args:
        model: a model in the state that the other one had before; changed in place.
        record: `config.collab_heads` of the other model; None if it has none.
    """
    adapter = adapter_for_config(model.config)
    if record is None:
        return
    layers, config = OpenLayers.of(model, adapter), CollabConfig.read(record)
    config.write(model, before=layers.record)
    for site in layers.with_heads:
        apply_state(site, config.site(site.site))
    for block in layers.feed_forwards:
        apply_feed_forward(block, config.site(block.site))


def rebuild_site(site: OpenSite, state: SiteState) -> None:
    """Bring one site from stock to its recorded state.

    Inner and outer models both rebuild, so the site may be in that state already.
    """
    if vars(site.module).get(STATE) == state:
        return
    check_record_fits(site, state)
    setattr(site.module, STATE, state)
    apply_state(site, state)
    changed: list[Any] = [site.module, site.output] if state.changes_output else [site.module]
    for module in changed:
        module._is_hf_initialized = False  # an inner stack may have initialised the stock module already


def rebuild_feed_forward(block: OpenFeedForward, state: FeedForwardState) -> None:
    """Bring one feed-forward block from stock to its recorded state.

    Raises:
        ConfigError: if the recorded number of neurons is not that of the stock block.
    """
    if vars(block.block).get(STATE) == state:
        return
    if block.num_neurons != state.num_neurons:
        raise ConfigError(
            f"config.{FIELD}, site {block.path!r}: the recorded {state.num_neurons} neurons do not fit the model's "
            f"{block.num_neurons}"
        )
    setattr(block.block, STATE, state)
    apply_feed_forward(block, state)
    changed: tuple[Any, ...] = block.modules
    for module in changed:
        module._is_hf_initialized = False  # an inner stack may have initialised the stock module already


def check_record_fits(site: OpenSite, state: SiteState) -> None:
    heads = site.adapter.num_heads(site.module)
    recorded: dict[str, object] = {"heads": state.num_heads}
    actual: dict[str, object] = {"heads": heads}
    if state.query_key is not None:
        check_kind_fits(site, state.query_key.kind)
        query, _ = site.projections
        recorded |= {"head width": state.query_key.dim_head, "query bias": state.query_key.bias}
        recorded |= {"scale": state.query_key.scale}
        actual |= {"head width": query.out_features // heads, "query bias": query.bias is not None}
        actual |= {"scale": site.adapter.scale(site.module)}
        groups = site.site.groups
        if groups is not None and state.kept is not None:
            groups = kept_groups(groups, state.kept)[1]
        if state.query_key.groups != groups:
            recorded |= {"key heads": state.query_key.groups}
            actual |= {"key heads": groups}
    if state.values is not None:
        recorded |= {"value head width": state.values.dim_head}
        actual |= {"value head width": site.value_width}
    if recorded != actual:
        raise ConfigError(
            f"config.{FIELD}, site {site.path!r}: the recorded {recorded} do not fit the model's {actual}"
        )


def check_kind_fits(site: OpenSite, kind: QueryKeyKind) -> None:
    """Raise ConfigError if a family cannot have a kind of query/key projection, as with rotary positions."""
    exact = site.adapter.exact_kind
    if kind != exact and (kind in DIVIDED or exact != EXACT_KIND):
        raise ConfigError(
            f"config.{FIELD}, site {site.path!r}: a query/key projection of the kind {kind!r} does not fit the model; "
            f"{exact!r} does"
        )
