"""Bring in the attention of models that accelerate has distributed or offloaded (`device_map`) while it is changed.

accelerate puts a `forward` of its own on each module, which moves inputs and weights to the module's device. It would
hide a change of class, and offloaded weights are on the meta device between the calls. So while attention is opened,
its hooks are removed and its weights (of no other module) are on the device where they run. Afterwards the modules are
hooked again: what was offloaded is offloaded again, to memory or to new files in the same folder.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ArgumentError, NonFiniteError, SwapError, UnsupportedModelError
from collab_heads.layers.layout import is_quantised
from collab_heads.model.device_hooks import HOOK, HookedModule, Place, aligning, check_hooks, hook_new
from collab_heads.model.open_feed_forward import OpenLayerSite, open_feed_forwards, open_layers
from collab_heads.model.open_site import OpenSite, open_sites
from collab_heads.model.refusals import check_not_inference, noting_replaced

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
NOT_FINITE = "contains NaN or inf: take a checkpoint from before, or load the model again"
UNPACK = "take the model as it was before it was quantised; where a target has int8=True, that stores eight bits"
BRING = "load the model with its weights, on the processor and without device_map"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def opening_attention(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function of a model, and perhaps of an adapter: the attention is in memory while it runs."""
    return opening(function, attention_modules)


def changing_attention(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function that changes or fits weights of attention.

    As `opening_attention`, but NaN and inf in these weights are refused before the function runs.
    """
    return opening(function, attention_modules, check_finite)


def changing_layers(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function that changes or fits weights of attention and of feed-forward blocks."""
    return opening(function, layer_modules, check_finite_layers)


def opening_model(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function that runs backward through the whole model: all of it is in memory while the function runs.

    The graph of the pass holds all weights anyway.
    """
    return opening(function, lambda model, _: [model])


def opening(
    function: Callable[Arguments, Result],
    roots: Callable[[PreTrainedModel, AttentionAdapter], list[nn.Module]],
    check: Callable[[PreTrainedModel, AttentionAdapter], None] | None = None,
) -> Callable[Arguments, Result]:
    """Wrap a function so that some modules of its model are in memory, without hooks, while it runs.

    Parameters that it replaces in the model are noted, so that optimizers which still hold them are refused.

    Args:
        function: a function of a model, and perhaps of an adapter.
        roots: returns the modules, for a model and its adapter.
        check: called with model and adapter before the function, when the modules are in memory.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        model = args[0] if args else kwargs.get("model")
        if not isinstance(model, PreTrainedModel):
            return function(*args, **kwargs)
        with noting_replaced(model):
            spread = is_spread(model)
            if not (spread or check):
                return function(*args, **kwargs)
            adapter = get_adapter(model, signature.bind(*args, **kwargs).arguments.get("adapter"))
            with in_memory(roots(model, adapter)) if spread else nullcontext():
                if check is not None:
                    check(model, adapter)
                    unmark_dequantised(model)
                return function(*args, **kwargs)

    return wrapper


@contextmanager
def in_memory(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Remove accelerate's hooks from modules and their submodules, and bring their weights in, during the context.

    Raises:
        SwapError: if a module has a hook that is not one of `device_map` or offloading, or its weights are brought in
            by a hook of an outer module.
    """
    hooked = [module for module in parts_of(roots) if HOOK in vars(module)]
    for module in hooked:
        check_hooks(module)
    loaded: dict[Place, nn.Parameter] = {}
    before = {module: HookedModule.opened(module, loaded) for module in hooked}
    whose = {root: [before[part] for part in root.modules() if part in before] for root in roots}
    try:
        check_brought_in(roots)
        yield
    finally:
        left = set(parts_of(roots))
        for module, was in before.items():
            was.close(module) if module in left else was.forget()
        for root, those in whose.items():
            hook_new(root, those)


def check_brought_in(roots: Sequence[nn.Module]) -> None:
    """Raise SwapError if weights of modules are still offloaded."""
    for module in parts_of(roots):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                raise SwapError(
                    f"the {name} of a {type(module).__name__} is on the meta device, and no hook of its own brings it "
                    "in: offload the model without preload_module_classes"
                )


def is_spread(model: nn.Module) -> bool:
    """Return True if accelerate has hooks on a model."""
    return any(HOOK in vars(module) for module in model.modules())


def is_offloaded(model: nn.Module) -> bool:
    """Return True if weights of a model are offloaded between its forward passes."""
    return any(hook.offload for module in model.modules() for hook in aligning(module))


def check_trainable(model: nn.Module, what: str) -> None:
    """Raise UnsupportedModelError if weights of a model cannot be trained: offloaded, or made in inference mode."""
    check_not_inference(model)
    if is_offloaded(model):
        raise UnsupportedModelError(
            f"{what} is for a model that is trained, and weights of this one are offloaded (device_map): save it, and "
            "load it whole, or on GPUs alone"
        )


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device for the inputs of a model, also where its first weights are offloaded."""
    if model.device.type != "meta":
        return model.device
    devices = [hook.execution_device for module in model.modules() for hook in aligning(module)]
    return next((torch.device(device) for device in devices if device is not None), model.device)


def attention_modules(model: PreTrainedModel, adapter: AttentionAdapter) -> list[nn.Module]:
    """Return the attention modules of a model and their output projections, where the adapter knows these."""
    return [module for site in open_sites(model, adapter, adapter.sites(model)) for module in modules_of(site)]


def layer_modules(model: PreTrainedModel, adapter: AttentionAdapter) -> list[nn.Module]:
    """Return the modules of attention and of feed-forward blocks that changes replace or write to."""
    blocks = open_feed_forwards(model, adapter)
    return [*attention_modules(model, adapter), *(module for block in blocks for module in block.modules)]


def modules_of(site: OpenLayerSite) -> list[nn.Module]:
    """Return the modules of a site; only the attention module if the adapter does not know the output projection."""
    try:
        return list(site.modules)
    except ArgumentError:
        return [site.module] if isinstance(site, OpenSite) else []


def check_finite(model: PreTrainedModel, adapter: AttentionAdapter) -> None:
    """Raise NonFiniteError if a weight of attention contains NaN or inf, which a forward pass may hide.

    Offloaded and quantised weights are skipped. Each weight is read once, and nothing is allocated.
    """
    check_finite_sites(model, open_sites(model, adapter))


def check_finite_layers(model: PreTrainedModel, adapter: AttentionAdapter) -> None:
    """As `check_finite`, also for feed-forward blocks."""
    check_finite_sites(model, open_layers(model, adapter))


def check_finite_sites(model: PreTrainedModel, sites: Sequence[OpenLayerSite]) -> None:
    """Raise NonFiniteError if a weight of some sites contains NaN or inf; the site and the weight are named."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for site in sites:
        for parameter in (each for module in modules_of(site) for each in module.parameters()):
            if not is_finite(parameter):
                raise NonFiniteError(f"{site.path}: its weight {names[id(parameter)]} {NOT_FINITE}")


def is_finite(parameter: torch.Tensor) -> bool:
    """Return False if a weight contains NaN or inf; one that is offloaded or quantised is not read."""
    is_here = parameter.numel() and not parameter.is_meta and not is_quantised(parameter)
    if not is_here or parameter.dtype not in FLOATS:
        return True
    return all(math.isfinite(edge) for edge in torch.aminmax(parameter.detach()))


def check_weights(model: PreTrainedModel) -> None:
    """Check that the processor can compute with every weight of a model.

    Raises:
        NonFiniteError: if one contains NaN or inf.
        UnsupportedModelError: if one is on another device, or quantised, or of a type without arithmetic.
    """
    for name, weight in model.named_parameters():
        if is_quantised(weight) or weight.dtype not in FLOATS:
            kind = weight.dtype if type(weight) in (torch.Tensor, nn.Parameter) else type(weight).__name__
            raise UnsupportedModelError(f"the weight {name} is {kind}, not floating point of 16 bits or more: {UNPACK}")
        if weight.device.type != "cpu":
            raise UnsupportedModelError(f"the weight {name} is on the {weight.device.type} device: {BRING}")
        if not is_finite(weight):
            raise NonFiniteError(f"the weight {name} {NOT_FINITE}")


def unmark_dequantised(model: PreTrainedModel) -> None:
    """Remove the mark of a quantiser from a model whose weights it has turned into floating point, in place.

    transformers leaves it there when it loads GGUF, and would not save the model.
    """
    quantiser = getattr(model, "hf_quantizer", None)
    if quantiser is None or not hasattr(quantiser.quantization_config, "dequantize"):
        return
    if all(weight.dtype in FLOATS and not is_quantised(weight) for weight in model.parameters()):
        quantiser.remove_quantization_config(model)


def parts_of(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Return modules and all their submodules, each once."""
    return list(dict.fromkeys(module for root in roots for module in root.modules()))
