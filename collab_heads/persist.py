"""Changed models load like any other: the hooks that rebuild them inside transformers.

Importing the package wraps two methods of `PreTrainedModel`: `post_init` (a model whose config records changed sites is
rebuilt before weights are loaded or initialised) and `_initialize_weights` (changed sites initialise themselves).
Models without the record pass through untouched.
"""

import functools
import re
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from collab_heads.collaborative.query_key import build_query_key, is_swapped
from collab_heads.config import FIELD, CollabConfig, SiteState
from collab_heads.errors import ConfigError
from collab_heads.registry import AttentionAdapter, adapter_for_config


def rebuild(model: PreTrainedModel) -> None:
    """Give a freshly built model the sites that its config records. Idempotent; works on the meta device.

    A site whose stack this model does not have is passed over (an encoder of an encoder-decoder).

    Raises:
        ConfigError: if the record does not fit the model; the site is named.
        UnsupportedModelError: if no adapter is registered for the model type.
    """
    record = CollabConfig.of(model.config)
    if not record.sites:
        return
    adapter, base = adapter_for_config(model.config), model.base_model
    present, stacks = {site.path: site for site in adapter.sites(model)}, dict(base.named_children())
    for path, state in record.sites.items():
        if not any(re.fullmatch(pattern, path) for pattern in adapter.paths):
            raise ConfigError(f"config.{FIELD}: {path!r} is not a site of attention in a {model.config.model_type}")
        if path.split(".")[0] not in stacks:
            continue
        if path not in present:
            raise ConfigError(
                f"config.{FIELD} records {path!r}, which this {type(model).__name__} does not have; "
                f"it has {', '.join(present) or 'no sites'}"
            )
        module = base.get_submodule(path)
        if not is_swapped(module):
            check_fit(adapter, module, path, state)
            adapter.install(module, empty_query_key(adapter, module, state))
            module._is_hf_initialized = False  # an inner stack may have initialised the stock module already


def empty_query_key(adapter: AttentionAdapter, module: nn.Module, state: SiteState) -> nn.Module:
    """Build the recorded query/key projection on the device and in the dtype of the stock one."""
    query, key = adapter.projections(module)
    dims, like = (query.in_features, key.in_features), query.weight
    return build_query_key(state.query_key, state.num_heads, *dims, device=like.device, dtype=like.dtype)


def check_fit(adapter: AttentionAdapter, module: nn.Module, path: str, state: SiteState) -> None:
    """Raise ConfigError if the recorded state does not fit the stock module."""
    query, _ = adapter.projections(module)
    heads = getattr(module, adapter.heads)
    recorded = state.num_heads, state.query_key.dim_head, state.query_key.bias, state.query_key.scale
    actual = heads, query.out_features // heads, query.bias is not None, float(module.scaling)
    if recorded != actual:
        raise ConfigError(
            f"config.{FIELD}, site {path!r}: recorded heads, head width, query bias and scale {recorded} "
            f"do not fit the model's {actual}"
        )


@torch.no_grad()
def initialize_site(model: PreTrainedModel, module: nn.Module, stock_initialize: Callable[[nn.Module], None]) -> None:
    """Initialise a changed site as the family initialises a stock one, then derive what is still missing from it.

    Stock projections stand in while the family's own initialisation runs, so its formulas need no copy here. What a
    checkpoint has filled stays.
    """
    adapter, query_key = adapter_for_config(model.config), module.query_key
    state, device = query_key.state, query_key.shared_query.weight.device
    width = query_key.num_heads * state.dim_head
    for name, projection, bias in (
        (adapter.query, query_key.shared_query, state.bias),
        (adapter.key, query_key.shared_key, False),
    ):
        stand_in = nn.Linear(projection.in_features, width, bias, device=device, dtype=projection.weight.dtype)
        stock_initialize(stand_in)
        setattr(module, name, stand_in)
    stock_initialize(module)
    dims = [projection.in_features for projection in adapter.projections(module)]
    start = build_query_key(state, query_key.num_heads, *dims, device=device, dtype=query_key.shared_query.weight.dtype)
    start.start_from(adapter.read(module))
    delattr(module, adapter.query)
    delattr(module, adapter.key)
    for parameter, value in zip(query_key.parameters(), start.parameters(), strict=True):
        if not getattr(parameter, "_is_hf_initialized", False):
            parameter.copy_(value)


def install_hooks() -> None:
    """Wrap `PreTrainedModel.post_init` and `_initialize_weights`, once."""
    if hasattr(PreTrainedModel.post_init, "collab_heads"):
        return
    stock_post_init, stock_initialize = PreTrainedModel.post_init, PreTrainedModel._initialize_weights

    @functools.wraps(stock_post_init)
    def post_init(self):
        rebuild(self)
        stock_post_init(self)

    @functools.wraps(stock_initialize)
    def _initialize_weights(self, module, *args, **kwargs):
        def stock(target):
            stock_initialize(self, target, *args, **kwargs)

        if is_swapped(module) and not getattr(module, "_is_hf_initialized", False):
            initialize_site(self, module, stock)
        else:
            stock(module)

    post_init.collab_heads = _initialize_weights.collab_heads = True
    PreTrainedModel.post_init, PreTrainedModel._initialize_weights = post_init, _initialize_weights
