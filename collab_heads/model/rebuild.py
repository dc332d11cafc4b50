"""Bring a freshly built model to the state that its config records."""

import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from collab_heads.errors import ConfigError
from collab_heads.layers.output import alphas_of, gates_of, install_alphas, install_gates, keep_output_heads
from collab_heads.layers.query_key import QueryKey
from collab_heads.layers.query_key_kinds import EXACT_KIND, build_query_key
from collab_heads.layers.values import keep_value_rows
from collab_heads.model.open_site import OpenSite, open_sites
from collab_heads.record import FIELD, STATE, CollabConfig
from collab_heads.registry import adapter_for_config, known_adapter
from collab_heads.sites import kept_groups
from collab_heads.state import DIVIDED, QueryKeyKind, QueryKeyState, SiteState


def rebuild(model: PreTrainedModel) -> None:
    """Give a freshly built model the sites that its config records. Idempotent; works on the meta device.

    A site whose stack this model does not have is passed over (an encoder of an encoder-decoder), and so is a model
    that only holds changed ones, each with a config of its own, which rebuild themselves (`EncoderDecoderModel`).

    Raises:
        ConfigError: if the record does not fit the model; the site is named.
        UnsupportedModelError: if no adapter is registered for the model type.
    """
    record = CollabConfig.of(model.config)
    if not record.sites or (known_adapter(model.config) is None and not hasattr(model.config, FIELD)):
        return
    adapter = adapter_for_config(model.config)
    stacks = {name for name, _ in model.base_model.named_children()}
    sites = {site.path: site for site in open_sites(model, adapter, adapter.sites(model))}
    for path, state in record.sites.items():
        if not any(re.fullmatch(pattern, path) for pattern in adapter.paths):
            raise ConfigError(f"config.{FIELD}: {path!r} is not a site of attention in a {model.config.model_type}")
        if path.split(".")[0] not in stacks:
            continue
        if path not in sites:
            raise ConfigError(
                f"config.{FIELD} records {path!r}, which this {type(model).__name__} does not have; "
                f"it has {', '.join(sites) or 'no sites'}"
            )
        rebuild_site(sites[path], state)


def catch_up(model: PreTrainedModel, record: Mapping | None) -> None:
    """Bring a model in use to the record of one that was changed further, as on another process.

    Heads go, and query/key projections and narrower values come; what these hold is to be copied from the other model.

    Args:
        model: as the other one was before; changed in place.
        record: `config.collab_heads` of the other one; None if it has none.
    """
    sites = open_sites(model, adapter_for_config(model.config))
    if record is None:
        return
    config = CollabConfig.read(record)
    config.write(model)
    for site in sites:
        state = config.site(site.site)
        numbers = range(state.num_heads) if state.kept is None else state.kept
        kept, heads = [i for i, number in enumerate(site.head_numbers) if number in numbers], site.num_heads
        if len(kept) < heads:
            site.adapter.shrink(site.module, kept)
            keep_output_heads(site.output, kept, heads)
        if state.query_key is not None and not site.is_swapped:
            query_key = empty_query_key(site, state.query_key, state.heads)
            query_key.requires_grad_(any(projection.weight.requires_grad for projection in site.projections))
            site.adapter.install(site.module, query_key)
        if state.values is not None and site.value_width > state.values.dim:
            keep_value_rows(site.value, site.output, site.value_width, state.values.dim)
            site.adapter.note_width(site.module)


def rebuild_site(site: OpenSite, state: SiteState) -> None:
    """Bring one site from stock to its recorded state: fewer heads, query and key, values, gates, alphas."""
    setattr(site.module, STATE, state)
    if is_rebuilt(site, state):
        return
    check_record_fits(site, state)
    if state.kept is not None:
        site.adapter.shrink(site.module, list(state.kept))
        keep_output_heads(site.output, list(state.kept), state.num_heads)
    if state.query_key is not None:
        site.adapter.install(site.module, empty_query_key(site, state.query_key, state.heads))
    if state.values is not None:
        keep_value_rows(site.value, site.output, site.value_width, state.values.dim)
        site.adapter.note_width(site.module)
    if state.gates is not None:
        install_gates(site.output, state.gates, state.heads)
    if state.alphas:
        install_alphas(site.output, state.heads)
    changed: list[Any] = [site.module, site.output] if state.changes_output else [site.module]
    for module in changed:
        module._is_hf_initialized = False  # an inner stack may have initialised the stock module already


def is_rebuilt(site: OpenSite, state: SiteState) -> bool:
    """Whether a site is in its recorded state already (inner and outer models both rebuild)."""
    if site.adapter.num_heads(site.module) != state.heads or site.is_swapped != (state.query_key is not None):
        return False
    if not state.changes_output:
        return True
    if state.values is not None and site.value_width != state.values.dim:
        return False
    has_gates, has_alphas = gates_of(site.output) is not None, alphas_of(site.output) is not None
    return has_gates == (state.gates is not None) and has_alphas == state.alphas


def empty_query_key(site: OpenSite, state: QueryKeyState, num_heads: int) -> QueryKey:
    """Build the recorded query/key projection on the device and in the dtype of the stock one."""
    query, key = site.projections
    dims, like = (query.in_features, key.in_features), query.weight
    return build_query_key(state, num_heads, *dims, device=like.device, dtype=like.dtype)


def check_record_fits(site: OpenSite, state: SiteState) -> None:
    """Raise ConfigError if the recorded state does not fit the stock module."""
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
    """Raise ConfigError if a family cannot have a kind of projection: rotations stand between query, key and score."""
    exact = site.adapter.exact_kind
    if kind != exact and (kind in DIVIDED or exact != EXACT_KIND):
        raise ConfigError(
            f"config.{FIELD}, site {site.path!r}: a query/key projection of the kind {kind!r} does not fit the model; "
            f"{exact!r} does"
        )
