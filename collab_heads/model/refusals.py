"""Checks that refuse models, sites and optimizers that cannot be changed in place, and name a way out."""

import math
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from collab_heads.base.wrappers import MERGE_FIRST, check_model, has_adapters
from collab_heads.errors import ArgumentError, ModelStateError, NonFiniteError, UnsupportedModelError
from collab_heads.layers.fused import FusedPart, identity, whole_of
from collab_heads.layers.layout import PLAIN, is_quantised
from collab_heads.layers.output import HeadOutputProjection
from collab_heads.model.open_layers import OpenFeedForward, OpenLayers, OpenLayerSite, OpenSite, modules_of
from collab_heads.sites.site import Site

HOOK = "_hf_hook"  # where accelerate keeps the hook of a module


def check_wrapper(model: nn.Module) -> None:
    """Raise UnsupportedModelError if `model` is a wrapper, is compiled or adapted, or no transformers model at all."""
    check_model(model)
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise UnsupportedModelError("cannot change a compiled model in place: swap before model.compile()")
    if has_adapters(model):
        raise UnsupportedModelError(f"cannot change a model with PEFT adapters in place: {MERGE_FIRST}")


def check_not_inference(model: nn.Module) -> None:
    """Raise UnsupportedModelError if weights were made in inference mode: torch writes to them only there."""
    if any(tensor.is_inference() for tensor in model.parameters()):
        raise UnsupportedModelError(
            f"weights of this {type(model).__name__} were made under torch.inference_mode(), and cannot be fitted or "
            "trained: build or load the model outside of it"
        )


def check_swappable(layers: OpenLayers, sites: Sequence[OpenSite]) -> None:
    """Raise ModelStateError unless every site is a stock module whose class and projections can be replaced."""
    check_unshared(layers, sites, ("query", "key"), inside=False)
    for site in sites:
        if site.is_swapped:
            raise ModelStateError(
                f"{site.path} is collaborative already: load the original checkpoint again to choose another width, "
                "or leave the site out with sites="
            )
        if site.adapter.stock_class(site.module) is None:
            raise ModelStateError(
                f"{site.path} is a {type(site.module).__name__}, not one of the stock classes that "
                f"{type(site.adapter).__name__} replaces ({', '.join(c.__name__ for c in site.adapter.replacements)})"
            )
        check_forward(site.site, site.module)
        for projection in (*site.projections, site.value):
            check_projection(site.site, projection)


def check_values(layers: OpenLayers, sites: Sequence[OpenSite]) -> None:
    """Raise ModelStateError unless the values of every site, and the columns that read them, can be replaced."""
    check_outputs(layers, sites)
    check_unshared(layers, sites, ("value", "output"))
    for site in sites:
        check_forward(site.site, site.module)
        check_projection(site.site, site.value)


def check_outputs(layers: OpenLayers, sites: Sequence[OpenSite]) -> None:
    """Raise ModelStateError unless the output projection of every site is unshared, and plain or one of ours."""
    check_unshared(layers, sites, ("output",))
    for site in sites:
        check_forward(site.site, site.output)
        if isinstance(site.output, HeadOutputProjection):
            check_weight(site.site, site.output)
        else:
            check_projection(site.site, site.output)


def check_prunable(layers: OpenLayers, sites: Sequence[OpenSite]) -> None:
    """Raise ModelStateError unless every projection of the sites is a plain Linear, and every class a known one."""
    check_outputs(layers, sites)
    check_unshared(layers, sites, ("query", "key", "value", "output"))
    for site in sites:
        check_forward(site.site, site.module)
        if site.adapter.stock_class(site.module) is None:
            raise ModelStateError(
                f"{site.path} is a {type(site.module).__name__}, not a class that {type(site.adapter).__name__} knows"
            )
        for projection in (*(() if site.is_swapped else site.projections), site.value):
            check_projection(site.site, projection)


def check_unshared(layers: OpenLayers, sites: Sequence[OpenSite], names: Sequence[str], *, inside: bool = True) -> None:
    """Raise ModelStateError if a projection of the sites, or its weight, is another one, too, which would change.

    Args:
        layers: the layers of the model.
        sites: those that are about to change.
        names: which of "query", "key", "value" and "output" change.
        inside: whether a weight that is used twice within a single site is refused, too.
    """
    if not sites:
        return
    owners: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for site in layers.with_heads:
        for name, projection in named_projections(site, names).items():
            owners.setdefault(identity(projection), []).append((site.path, name))
    changing = {site.path for site in sites}
    for places in owners.values():
        (path, name), *others = sorted(places, key=lambda place: place[0] not in changing)
        for other, other_name in others:
            if path in changing and (inside or other != path):
                raise ModelStateError(
                    f"the {name} projection of {path} is the {other_name} projection of {other}, too: changing one "
                    "would change both; give one a copy of its own (copy.deepcopy) first"
                )


def named_projections(site: OpenSite, names: Sequence[str]) -> dict[str, nn.Module | FusedPart]:
    """Return some projections of a site by name; a collaborative site has neither "query" nor "key"."""
    projections: dict[str, nn.Module | FusedPart] = {"value": site.value}
    if not site.is_swapped:
        projections["query"], projections["key"] = site.projections
    if "output" in names:
        projections["output"] = site.output
    return {name: projections[name] for name in names if name in projections}


def check_feed_forwards(model: PreTrainedModel, blocks: Sequence[OpenFeedForward]) -> None:
    """Raise ModelStateError unless every block is one that its family computes, with projections that can be replaced.

    A layer of a class of its own may use the neurons otherwise, and a projection that stands elsewhere, too, would
    change there.
    """
    owners: dict[int, set[int]] = {}  # parameter -> modules that hold it
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    for block in blocks:
        family = {cls.__module__ for cls in block.adapter.replacements}
        for module in holders_of(block):
            if type(module).__module__ not in family:
                raise ModelStateError(
                    f"{block.path} holds a {type(module).__name__}, which is not a part of a feed-forward block of the "
                    'family: leave it out with sites=, or all blocks with parts=("heads", "query_key", "values")'
                )
            if HOOK not in vars(module):  # accelerate sets a forward on modules that it distributes
                check_forward(block.site, module)
        for module in block.modules:
            check_forward(block.site, module)
            check_projection(block.site, module)
            if places[module] > 1 or any(len(owners[id(each)]) > 1 for each in module.parameters()):
                raise ModelStateError(
                    f"{block.path}: a projection of this feed-forward block stands in another place, too, which would "
                    "change with it; give one a copy of its own (copy.deepcopy) first"
                )


def holders_of(block: OpenFeedForward) -> list[nn.Module]:
    """Return the module of a feed-forward block and those in it that hold its projections."""
    inside = [module for module in block.block.modules() if module not in block.modules]
    return [module for module in inside if any(part in block.modules for part in module.modules())]


def check_forward(site: Site, module: nn.Module) -> None:
    """Raise ModelStateError if a module's forward is overridden on the instance: it would hide a change of class."""
    if "forward" in vars(module):
        raise ModelStateError(
            f"{site.path} has a forward of its own, set on the instance, which would hide the new class: take it off "
            "(del module.forward), also where accelerate's remove_hook_from_module left it behind"
        )


def check_projection(site: Site, projection: nn.Module | FusedPart) -> None:
    """Raise ModelStateError unless a projection is a plain Linear or Conv1D with real weights, or a part of one."""
    whole = whole_of(projection)
    if type(whole) not in PLAIN or "weight" not in whole._parameters:
        raise ModelStateError(
            f"{site.path}: a projection is a {type(whole).__module__}.{type(whole).__name__}, not a plain "
            "nn.Linear (quantised, or with adapters): swap before quantising, or merge the adapters first"
        )
    check_weight(site, whole)


def check_weight(site: Site, projection: nn.Module) -> None:
    """Raise ModelStateError unless a projection has real, floating point weights."""
    weight = cast(Tensor, projection.weight)
    if weight.is_meta:
        raise ModelStateError(f"{site.path}: its weights are on the meta device: load the checkpoint before swapping")
    if is_quantised(weight):
        kind = type(weight).__name__ if weight.is_floating_point() else weight.dtype
        raise ModelStateError(
            f"{site.path}: its weights are {kind}, not floating point: change the model, then quantise it"
        )


NOT_FINITE = "contains NaN or inf: take a checkpoint from before, or load the model again"
UNPACK = "take the model as it was before it was quantised; where a target has int8=True, that stores eight bits"
BRING = "load the model with its weights, on the processor and without device_map"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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


REMOVED = WeakTensorKeyDictionary()  # parameter that is alive -> the model that it was in
MADE = WeakTensorKeyDictionary()  # parameters that took the place of others
CHECKED: list[Any] = []  # the handle of the hook, once it is registered


@contextmanager
def noting_replaced(model: PreTrainedModel) -> Iterator[None]:
    """Note which parameters of a model are replaced while the context is open, and by which ones."""
    before = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}
    try:
        yield
    finally:
        now = {id(parameter): parameter for parameter in model.parameters()}
        removed = [was() for key, was in before.items() if was() is not now.get(key)]
        outliving = [parameter for parameter in removed if parameter is not None]
        for key, parameter in now.items():
            if key not in before or before[key]() is not parameter:
                MADE[parameter] = True
                REMOVED.pop(parameter, None)
        for parameter in outliving:
            REMOVED[parameter] = weakref.ref(model)
        if outliving and not CHECKED:
            CHECKED.append(register_optimizer_step_pre_hook(check_optimizer))


def check_optimizer(optimizer: torch.optim.Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Raise ArgumentError if an optimizer holds removed parameters but not the trainable ones that replaced them."""
    if not REMOVED:
        return
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    removed = [parameter for parameter in held if parameter in REMOVED]
    models = {id(model): model for model in (REMOVED[parameter]() for parameter in removed) if model is not None}
    ids = {id(parameter) for parameter in held}
    for model in models.values():
        named = model.named_parameters()
        missing = [name for name, p in named if p.requires_grad and p in MADE and id(p) not in ids]
        if missing:
            raise ArgumentError(
                f"this {type(optimizer).__name__} was made before layers of the {type(model).__name__} were changed: "
                f"it holds {len(removed)} parameters that are no longer in the model, and not {missing[0]} and "
                f"{len(missing) - 1} others that are trainable in their place. Make a new optimizer, and its schedule, "
                "after the change (with a Trainer: make a new Trainer)"
            )
