"""Collaborative attention from scratch: a config that any `from_config` builds."""

import copy
from collections.abc import Iterable, Mapping

import torch
from transformers import AutoModel, PretrainedConfig

from collab_heads.checks import check_choice
from collab_heads.collaborative.swap import plan_width
from collab_heads.collaborative.widths import Width, plan_widths
from collab_heads.errors import ArgumentError, SwapError
from collab_heads.registry import AttentionAdapter, get_adapter
from collab_heads.sites import select_sites
from collab_heads.state import FIELD, KINDS, MIXING_INITS, CollabConfig, QueryKeyState, SiteState


def collaborative_config(
    config: PretrainedConfig,
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
    dim_shared_query_key: Width | Mapping[str, Width] = None,
    *,
    mixing: str = "shared",
    mixing_init: str = "concatenate",
    sites: str | Iterable[str] | None = None,
) -> PretrainedConfig:
    """Describe a model with collaborative attention, to be trained from scratch.

    Args:
        config: the stock config; it is left as it is.
        adapter: as in `swap_to_collaborative`.
        dim_shared_query_key: as in `swap_to_collaborative`.
        mixing: "shared" or "per_head".
        mixing_init: how "shared" mixing starts: "concatenate" (0/1 blocks: heads begin separate), "ones" (heads begin
            alike) or "normal" (standard deviation 0.2).
        sites: roles or paths; None for all.

    Returns:
        A copy of the config: `AutoModel...from_config(copy)` builds the model, freshly initialised.

    Raises:
        UnsupportedModelError: if there is no adapter for the config.
        ArgumentError: on a width, role, path, mixing or start that cannot work.
        SwapError: if the config describes a changed model already.
    """
    check_choice("mixing", mixing, KINDS)
    check_choice("mixing_init", mixing_init, MIXING_INITS)
    if not isinstance(config, PretrainedConfig):
        raise ArgumentError(f"expected a transformers config, got {type(config).__name__}")
    if mixing == "per_head" and mixing_init != "concatenate":
        raise ArgumentError(f"mixing_init={mixing_init!r} has no meaning for mixing='per_head', which does not mix")
    if CollabConfig.of(config).sites:
        raise SwapError(f"config.{FIELD} describes changed sites already: start from the stock config")
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    adapter = get_adapter(model, adapter)
    available = adapter.sites(model)
    widths = plan_widths(available, select_sites(available, sites), dim_shared_query_key)
    record = {}
    for site in available:
        if site.path in widths:
            weights = adapter.read(model.base_model.get_submodule(site.path))
            _, dim = plan_width(site, weights, widths[site.path], mixing)
            bias = weights.query_bias is not None
            state = QueryKeyState(mixing, dim, weights.dim_head, weights.scale, bias, mixing_init)
            record[site.path] = SiteState(site.role, site.num_heads, state)
    setattr(config, FIELD, CollabConfig(record).to_dict())
    return config
