"""The door to a model: its layers are opened once, checked, and handed to the code that reads, fits or changes them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from collab_heads.contract.adapter import AttentionAdapter, Capability
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ModelStateError, UnsupportedModelError
from collab_heads.model.open_layers import OpenLayers, OpenLayerSite, modules_of
from collab_heads.model.refusals import (
    HOOK,
    check_finite_sites,
    check_not_inference,
    check_wrapper,
    noting_replaced,
    unmark_dequantised,
)

LOAD_WHOLE = "load the model whole, without offloading (on GPUs alone, or on the processor), and save what you get"


@contextmanager
def opened(
    model: PreTrainedModel,
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
    capability: Capability | None = None,
    *,
    changes: bool = False,
    of: Literal["attention", "layers", "model"] = "attention",
) -> Iterator[OpenLayers]:
    """Open the layers of a model while the context is open.

    The hooks with which accelerate distributes a model (`device_map`) would hide a change of class. They are taken off
    meanwhile, and put on again. Parameters that are replaced are noted: an optimizer that holds them is refused.

    Args:
        model: a supported transformers model.
        adapter: its adapter, as class or instance; None for the registered one.
        capability: what the adapter must be able to do.
        changes: whether the layers are to be changed, or fitted to: wrapped models, and weights with NaN or inf, are
            refused.
        of: what is opened: the attention, all layers (feed-forward blocks, too), or the whole model.

    Raises:
        UnsupportedModelError, ArgumentError: as in `get_adapter`, or because the model is wrapped.
        NonFiniteError: if a weight contains NaN or inf.
        ModelStateError: if weights are offloaded, or a hook of accelerate does more than place weights.
    """
    if changes:
        check_wrapper(model)
    layers = OpenLayers.of(model, get_adapter(model, adapter, capability))
    modules = roots(layers, of)
    check_here(model, modules)
    with noting_replaced(model), without_hooks(modules):
        if changes:
            check_finite_sites(model, layers.with_heads if of == "attention" else layers.in_order)
            unmark_dequantised(model)
        yield layers


def roots(layers: OpenLayers, of: Literal["attention", "layers", "model"]) -> list[nn.Module]:
    """Return the modules that are opened; parts of others among them."""
    if of == "model":
        return [layers.model]
    sites: list[OpenLayerSite] = [*layers.attention, *(layers.feed_forwards if of == "layers" else ())]
    return [module for site in sites for module in modules_of(site)]


def check_here(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Raise ModelStateError if weights of modules are offloaded."""
    if any(parameter.is_meta for module in modules for parameter in module.parameters()) and placing(model):
        raise ModelStateError(f"weights of this {type(model).__name__} are offloaded (device_map): {LOAD_WHOLE}")


@contextmanager
def without_hooks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Take accelerate's hooks off modules and their submodules during the context.

    Raises:
        ModelStateError: if one of them is not of a `device_map`.
    """
    hooks = {part: vars(part)[HOOK] for part in parts_of(modules) if HOOK in vars(part)}
    for part, hook in hooks.items():
        check_hook(part, hook)
    if not hooks:
        yield
        return
    from accelerate.hooks import add_hook_to_module, remove_hook_from_module

    for part in hooks:
        remove_hook_from_module(part)
        if getattr(vars(part).get("forward"), "__func__", None) is type(part).forward:
            del part.forward  # which accelerate leaves there
    try:
        yield
    finally:
        left = set(parts_of(modules))
        for part in hooks.keys() & left:
            add_hook_to_module(part, hooks[part])


def parts_of(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return modules and all their submodules, each once."""
    return list(dict.fromkeys(part for module in modules for part in module.modules()))


def check_hook(module: nn.Module, hook: Any) -> None:
    strange = [type(each).__name__ for each in each_hook(hook) if not hasattr(each, "weights_map")]
    if strange:
        raise ModelStateError(
            f"a {type(module).__name__} has a hook of accelerate that is not of a device_map, {strange[0]}: take it "
            "off (accelerate.hooks.remove_hook_from_module), change the model, and put it on again"
        )


def each_hook(hook: Any) -> list[Any]:
    """Return a hook, or those inside a sequence of hooks, as a list; empty for None."""
    if hook is None:
        return []
    return [each for part in hook.hooks for each in each_hook(part)] if hasattr(hook, "hooks") else [hook]


def placing(model: nn.Module) -> list[Any]:
    """Return the hooks in a model that place or offload weights."""
    hooks = [hook for module in model.modules() for hook in each_hook(vars(module).get(HOOK))]
    return [hook for hook in hooks if hasattr(hook, "weights_map")]


def check_trainable(model: nn.Module, what: str) -> None:
    """Raise UnsupportedModelError if weights of a model cannot be trained: offloaded, or made in inference mode."""
    check_not_inference(model)
    if any(hook.offload for hook in placing(model)):
        raise UnsupportedModelError(
            f"{what} is for a model that is trained, and weights of this one are offloaded (device_map): save it, and "
            "load it whole, or on GPUs alone"
        )


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device for the inputs of a model, also where its first weights are offloaded."""
    if model.device.type != "meta":
        return model.device
    devices = [hook.execution_device for hook in placing(model)]
    return next((torch.device(device) for device in devices if device is not None), model.device)
