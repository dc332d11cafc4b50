"""Collaborative attention from scratch: a config that any `from_config` builds."""

import copy
from collections.abc import Iterable, Mapping

import torch
from transformers import AutoModel, PretrainedConfig

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import check_choice
from collab_heads.collaborative.plan import choose_sites, plan_site, plan_values
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ArgumentError, ModelStateError
from collab_heads.fitting.kinds import FITS, check_kind, kind_for
from collab_heads.fitting.widths import Width
from collab_heads.model.open_layers import OpenLayers
from collab_heads.sites.record import FIELD, CollabConfig
from collab_heads.sites.state import MIXING_INITS, MixingInit, QueryKeyKind, SiteState


@checking_arguments
def collaborative_config(
    config: PretrainedConfig,
    dim_shared_query_key: Width | Mapping[str, Width] = None,
    *,
    dim_value: Width | Mapping[str, Width] = None,
    kind: QueryKeyKind = "shared",
    mixing_init: MixingInit = "concatenate",
    sites: str | Iterable[str] | None = None,
) -> PretrainedConfig:
    """Describe a model with collaborative attention, to be trained from scratch.

    Examples:
        >>> from transformers import AutoModel, BertConfig
        >>> stock = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = AutoModel.from_config(collaborative_config(stock, 32))
        >>> model.encoder.layer[0].attention.self.query_key.mixing.shape  # (H, R)
        torch.Size([4, 32])

    Args:
        config: the stock config, which is not changed.
        dim_shared_query_key: as in `swap_to_collaborative`.
        dim_value: as in `swap_to_collaborative`.
        kind: "shared" or "per_head".
        mixing_init: the initial mixing matrix of kind "shared": "concatenate" (0/1 blocks: heads start separate),
            "ones" (heads start alike), "normal" (random, standard deviation 0.2) or "xavier" (random, within
            ±√(6 / (heads + width)), Glorot and Bengio 2010).
        sites: roles or paths; None for all.

    Returns:
        A copy of the config: `AutoModel...from_config(copy)` builds the model, freshly initialised.

    Raises:
        UnsupportedModelError: if there is no adapter for the config, or its model type does not support the change.
        ArgumentError: on a width, role, path, kind or initial mixing that cannot work.
        ModelStateError: if the config describes a changed model already.
    """
    check_kind(kind, mixing_init=(mixing_init, MIXING_INITS[0]))
    check_choice("mixing_init", mixing_init, MIXING_INITS)
    if not isinstance(config, PretrainedConfig):
        raise ArgumentError(f"expected a transformers config, got {type(config).__name__}")
    if CollabConfig.of(config).states:
        raise ModelStateError(f"config.{FIELD} describes changed sites already: start from the stock config")
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    record = {}
    only_values = dim_value is not None and dim_shared_query_key is None
    adapter = get_adapter(model, capability="values" if only_values else FITS[kind].capability)
    kind = kind_for(adapter, kind)
    swapped, narrowed = choose_sites(OpenLayers.of(model, adapter), sites, dim_shared_query_key, dim_value, kind)
    values = {site.path: plan_values(site, asked).state for site, asked in narrowed}
    for site, asked, kind in swapped:
        state = plan_site(site, asked, kind, mixing_init).state()
        record[site.path] = SiteState(site.role, site.num_heads, state, values.get(site.path))
    setattr(config, FIELD, CollabConfig(record).to_dict())
    return config
