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

from collab_heads.errors import ConfigError
from collab_heads.layers.alphas import HeadAlphas
from collab_heads.layers.gates import HeadGates
from collab_heads.layers.output import (
    ConstantOutput,
    HeadOutputProjection,
    alphas_of,
    gates_of,
    install_alphas,
    install_gates,
    keep_output_heads,
)
from collab_heads.layers.query_key import build_query_key, is_swapped
from collab_heads.layers.removed import is_empty
from collab_heads.registry import AttentionAdapter, adapter_for_config
from collab_heads.sites import AttentionSite
from collab_heads.state import FIELD, CollabConfig, SiteState


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
        rebuild_site(adapter, model, present[path], state)


def rebuild_site(adapter: AttentionAdapter, model: PreTrainedModel, site: AttentionSite, state: SiteState) -> None:
    """Bring one site from stock to its recorded state: fewer heads, the query/key projection, gates, alphas."""
    module, output = model.base_model.get_submodule(site.path), None
    if state.kept is not None or state.gates is not None or state.alphas:
        output = adapter.output_projection(model, site)
    if is_rebuilt(adapter, module, output, state):
        return
    check_fit(adapter, module, site.path, state)
    if state.kept is not None:
        adapter.shrink(module, list(state.kept))
        keep_output_heads(output, list(state.kept), state.num_heads)
    if state.query_key is not None:
        adapter.install(module, empty_query_key(adapter, module, state))
    if state.gates is not None:
        install_gates(output, state.gates, state.heads)
    if state.alphas:
        install_alphas(output, state.heads)
    for changed in filter(None, (module, output)):
        changed._is_hf_initialized = False  # an inner stack may have initialised the stock module already


def is_rebuilt(adapter: AttentionAdapter, module: nn.Module, output: nn.Module | None, state: SiteState) -> bool:
    """Whether a site is in its recorded state already (inner and outer models both rebuild)."""
    return (
        getattr(module, adapter.heads) == state.heads
        and is_swapped(module) == (state.query_key is not None)
        and (output is None or (gates_of(output) is None) == (state.gates is None))
        and (output is None or (alphas_of(output) is not None) == state.alphas)
    )


def empty_query_key(adapter: AttentionAdapter, module: nn.Module, state: SiteState) -> nn.Module:
    """Build the recorded query/key projection on the device and in the dtype of the stock one."""
    query, key = adapter.projections(module)
    dims, like = (query.in_features, key.in_features), query.weight
    return build_query_key(state.query_key, state.heads, *dims, device=like.device, dtype=like.dtype)


def check_fit(adapter: AttentionAdapter, module: nn.Module, path: str, state: SiteState) -> None:
    """Raise ConfigError if the recorded state does not fit the stock module."""
    heads = getattr(module, adapter.heads)
    recorded, actual = {"heads": state.num_heads}, {"heads": heads}
    if state.query_key is not None:
        query, _ = adapter.projections(module)
        recorded |= {"head width": state.query_key.dim_head, "query bias": state.query_key.bias}
        recorded |= {"scale": state.query_key.scale}
        actual |= {"head width": query.out_features // heads, "query bias": query.bias is not None}
        actual |= {"scale": float(module.scaling)}
    if recorded != actual:
        raise ConfigError(f"config.{FIELD}, site {path!r}: the recorded {recorded} do not fit the model's {actual}")


@torch.no_grad()
def initialize_site(model: PreTrainedModel, module: nn.Module, stock_initialize: Callable[[nn.Module], None]) -> None:
    """Initialise a changed site as the family initialises a stock one, then derive what is still missing from it.

    Stock projections stand in while the family's own initialisation runs, so its formulas need no copy here. What a
    checkpoint has filled stays.
    """
    adapter, query_key = adapter_for_config(model.config), module.query_key
    if is_empty(module):
        initialize_empty(model, adapter, module, stock_initialize)
        return
    state, device = query_key.state, query_key.shared_query.weight.device
    # a pruned site may share more dimensions than the heads that it has left had rows
    width = query_key.num_heads * max(state.dim_head, -(-state.dim // query_key.num_heads))
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
        fill(parameter, value)


def initialize_empty(model, adapter, module, stock_initialize) -> None:
    """Initialise what a site without heads has left (T5's position bias): stand-ins for all its projections."""
    names = [adapter.query, adapter.key, adapter.value]
    if adapter.output is not None and "." not in adapter.output:
        names.append(adapter.output)
    left = {name: getattr(module, name) for name in names if hasattr(module, name)}
    for name in names:
        setattr(module, name, nn.Linear(1, 1))
    stock_initialize(module)
    for name in names:
        delattr(module, name)
    for name, part in left.items():
        setattr(module, name, part)


@torch.no_grad()
def initialize_output(module: nn.Module, stock_initialize: Callable[[nn.Module], None]) -> None:
    """Initialise a changed output projection: weights as the family does, gates open, a lone bias zero."""
    if isinstance(module, HeadOutputProjection):
        stand_in = nn.Linear(
            module.in_features, module.out_features, module.bias is not None, device=module.weight.device
        ).to(module.weight.dtype)
        stock_initialize(stand_in)
        fill(module.weight, stand_in.weight)
        if module.bias is not None:
            fill(module.bias, stand_in.bias)
    elif module.bias is not None:
        fill(module.bias, torch.zeros_like(module.bias))


@torch.no_grad()
def initialize_part(part: HeadGates | HeadAlphas) -> None:
    """Open the gates, and make the alphas an identity, that no checkpoint has set."""
    (tensor,) = part.state_dict(keep_vars=True).values()
    if not getattr(tensor, "_is_hf_initialized", False):
        part.reset()


def fill(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Give a parameter its start unless a checkpoint has filled it."""
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

        if getattr(module, "_is_hf_initialized", False):
            stock(module)
        elif is_swapped(module) or is_empty(module):
            initialize_site(self, module, stock)
        elif isinstance(module, HeadOutputProjection | ConstantOutput):
            initialize_output(module, stock)
            module._is_hf_initialized = True
        elif isinstance(module, HeadGates | HeadAlphas):
            initialize_part(module)
            module._is_hf_initialized = True
        else:
            stock(module)

    post_init.collab_heads = _initialize_weights.collab_heads = True
    PreTrainedModel.post_init, PreTrainedModel._initialize_weights = post_init, _initialize_weights
