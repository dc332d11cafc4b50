"""Initialise changed modules as their family initialises stock ones, except what a checkpoint has filled."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import adapter_for_config
from collab_heads.errors import UnsupportedModelError
from collab_heads.layers.alphas import HeadAlphas
from collab_heads.layers.gates import HeadGates
from collab_heads.layers.layout import is_quantised, is_transposed
from collab_heads.layers.output import ConstantOutput, HeadOutputProjection
from collab_heads.layers.query_key import QueryKey, is_swapped
from collab_heads.layers.query_key_kinds import build_query_key
from collab_heads.layers.removed import EmptyProjection, is_empty
from collab_heads.sites.site import count_key_heads

Initialize = Callable[[nn.Module], None]


def initialize_changed(model: PreTrainedModel, module: nn.Module, stock_initialize: Initialize) -> bool:
    """Initialise a module if it is one of ours.

    Args:
        model: the model that the module belongs to.
        module: any module of the model.
        stock_initialize: transformers' own initialisation of a module.

    Returns:
        Whether it is one of ours, and now initialised.
    """
    if is_swapped(module):
        initialize_site(adapter_for_config(model.config), module, stock_initialize)
    elif is_empty(module):
        initialize_without_heads(adapter_for_config(model.config), module, stock_initialize)
    elif isinstance(module, HeadOutputProjection | ConstantOutput):
        initialize_output(module, stock_initialize)
        mark_initialized(module)
    elif isinstance(module, EmptyProjection):
        if module.bias is not None:
            fill(module.bias, torch.zeros_like(module.bias))
        mark_initialized(module)
    elif isinstance(module, HeadGates | HeadAlphas):
        initialize_part(module)
        mark_initialized(module)
    else:
        return False
    return True


@torch.no_grad()
def initialize_site(adapter: AttentionAdapter, module: nn.Module, stock_initialize: Initialize) -> None:
    """Initialise a collaborative site as its family does a stock one, then derive the missing projection from it.

    Stock projections stand in while the family's own initialisation runs, so that its formulas are not copied here.
    Tensors that a checkpoint has filled stay. Where it has filled the whole query/key projection nothing is derived,
    and its weights may be quantised.

    Raises:
        UnsupportedModelError: if a part of the projection is missing where other weights of the site are quantised.
    """
    query_key = cast(QueryKey, module.query_key)
    derives = not is_filled(query_key)
    if derives:
        check_float(module)
        for name, stand_in in stand_ins(adapter, query_key).items():
            stock_initialize(stand_in)
            setattr(module, name, stand_in)
    missing = [name for name in adapter.stock_names(module) if not hasattr(module, name)]
    for name in missing:  # the family's own initialisation may access the stock projections
        setattr(module, name, nn.Linear(1, 1))
    stock_initialize(module)
    for name in missing:
        delattr(module, name)
    if derives:
        initial = built_like(query_key)
        initial.initialize_from(adapter.read(module))
        delattr(module, adapter.query)
        delattr(module, adapter.key)
        for tensor, value in zip(tensors_of(query_key), tensors_of(initial), strict=True):
            fill(tensor, value)


def stand_ins(adapter: AttentionAdapter, query_key: QueryKey) -> dict[str, nn.Linear]:
    """Return stock query and key projections to use in place of ours during initialisation, by name."""
    state, like = query_key.state, query_key.shared_query.weight
    # a pruned site may share more dimensions than the heads that it has left had rows
    width = max(state.dim_head, -(-state.dim // query_key.num_heads))
    rows_and_inputs = {
        adapter.query: (query_key.num_heads, query_key.shared_query.in_features),
        adapter.key: (count_key_heads(query_key.num_heads, state.groups), query_key.shared_key.in_features),
    }
    return {  # with a bias for the key, too: SigLIP's initialisation wants it
        name: nn.Linear(inputs, heads * width, state.bias, device=like.device, dtype=like.dtype)
        for name, (heads, inputs) in rows_and_inputs.items()
    }


def built_like(query_key: QueryKey) -> QueryKey:
    """Return an uninitialised query/key projection with the same state, device and dtype."""
    like, dims = query_key.shared_query.weight, (query_key.shared_query.in_features, query_key.shared_key.in_features)
    return build_query_key(query_key.state, query_key.num_heads, *dims, device=like.device, dtype=like.dtype)


def is_filled(module: nn.Module, *, recurse: bool = True) -> bool:
    """Return True if a checkpoint has filled all tensors of a module."""
    tensors = (*module.parameters(recurse), *module.buffers(recurse))
    return all(getattr(tensor, "_is_hf_initialized", False) for tensor in tensors)


def check_float(module: nn.Module) -> None:
    for name, tensor in module.named_parameters():
        if is_quantised(tensor):
            raise UnsupportedModelError(
                f"the checkpoint lacks weights of a {type(module).__name__} in which {name} is to be quantised, and "
                "quantised weights cannot be initialised: load it without quantization_config, save it, quantise that"
            )


def tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def initialize_without_heads(adapter: AttentionAdapter, module: nn.Module, stock_initialize: Initialize) -> None:
    """Initialise the rest of a site without heads (T5's position bias), with stand-ins for its projections."""
    names = list(dict.fromkeys((adapter.query, adapter.key, adapter.value, *adapter.stock_names(module))))
    if adapter.output is not None and "." not in adapter.output:
        names.append(adapter.output)
    remaining = {name: getattr(module, name) for name in names if hasattr(module, name)}
    for name in names:
        setattr(module, name, nn.Linear(1, 1))
    stock_initialize(module)
    for name in names:
        delattr(module, name)
    for name, part in remaining.items():
        setattr(module, name, part)


@torch.no_grad()
def initialize_output(module: HeadOutputProjection | ConstantOutput, stock_initialize: Initialize) -> None:
    """Initialise a changed output projection: weights as its family does, gates open, a bias alone as zero."""
    if is_filled(module, recurse=False):
        return
    if isinstance(module, HeadOutputProjection):
        stand_in = nn.Linear(
            module.in_features, module.out_features, module.bias is not None, device=module.weight.device
        ).to(module.weight.dtype)
        stock_initialize(stand_in)
        fill(module.weight, stand_in.weight.mT if is_transposed(module) else stand_in.weight)
        if module.bias is not None:
            fill(module.bias, stand_in.bias)
    elif module.bias is not None:
        fill(module.bias, torch.zeros_like(module.bias))


@torch.no_grad()
def initialize_part(part: HeadGates | HeadAlphas) -> None:
    """Open gates, or set alphas to the identity, unless a checkpoint has filled them."""
    (tensor,) = part.state_dict(keep_vars=True).values()
    if not getattr(tensor, "_is_hf_initialized", False):
        part.reset()


def fill(parameter: Tensor, value: Tensor) -> None:
    """Set a parameter to its initial value unless a checkpoint has filled it."""
    if not getattr(parameter, "_is_hf_initialized", False):
        parameter.copy_(value)


def mark_initialized(module: nn.Module) -> None:
    module.__dict__["_is_hf_initialized"] = True
