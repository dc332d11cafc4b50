"""Checks that refuse models, sites and optimizers that cannot be changed in place, and name a way out."""

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
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.errors import ArgumentError, SwapError, UnsupportedModelError
from collab_heads.layers.fused import FusedPart, identity, whole_of
from collab_heads.layers.layout import PLAIN, is_quantised
from collab_heads.layers.output import HeadOutputProjection
from collab_heads.model.device_hooks import HOOK
from collab_heads.model.open_feed_forward import OpenFeedForward
from collab_heads.model.open_site import OpenSite, open_sites
from collab_heads.sites.site import AttentionSite, Site


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


def check_swappable(model: PreTrainedModel, adapter: AttentionAdapter, sites: Sequence[OpenSite]) -> None:
    """Raise SwapError unless every site is a stock attention module whose class and projections can be replaced."""
    check_unshared(model, adapter, [site.site for site in sites], ("query", "key"), inside=False)
    for site in sites:
        if site.is_swapped:
            raise SwapError(
                f"{site.path} is collaborative already: load the original checkpoint again to choose another width, "
                "or leave the site out with sites="
            )
        if adapter.stock_class(site.module) is None:
            raise SwapError(
                f"{site.path} is a {type(site.module).__name__}, not one of the stock classes that "
                f"{type(adapter).__name__} replaces ({', '.join(c.__name__ for c in adapter.replacements)})"
            )
        check_forward(site.site, site.module)
        for projection in (*site.projections, site.value):
            check_projection(site.site, projection)


def check_values(model: PreTrainedModel, adapter: AttentionAdapter, sites: Sequence[OpenSite]) -> None:
    """Raise SwapError unless the values of every site, and the columns that read them, can be replaced."""
    check_outputs(model, adapter, [site.site for site in sites])
    check_unshared(model, adapter, [site.site for site in sites], ("value", "output"))
    for site in sites:
        check_forward(site.site, site.module)
        check_projection(site.site, site.value)


def check_outputs(model: PreTrainedModel, adapter: AttentionAdapter, sites: Sequence[AttentionSite]) -> None:
    """Raise SwapError unless the output projection of every site is unshared, and a plain Linear or one of ours."""
    check_unshared(model, adapter, sites, ("output",))
    for site in open_sites(model, adapter, sites):
        check_forward(site.site, site.output)
        if isinstance(site.output, HeadOutputProjection):
            check_weight(site.site, site.output)
        else:
            check_projection(site.site, site.output)


def check_unshared(
    model: PreTrainedModel,
    adapter: AttentionAdapter,
    sites: Sequence[AttentionSite],
    names: Sequence[str],
    *,
    inside: bool = True,
) -> None:
    """Raise SwapError if a projection of the sites, or its weight, is also another one, which would change with it.

    Args:
        model: the model.
        adapter: its adapter.
        sites: those that are about to change.
        names: which of "query", "key", "value" and "output" change.
        inside: whether a weight that is used twice within a single site is refused, too.
    """
    if not sites:
        return
    owners: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for site in open_sites(model, adapter):
        for name, projection in named_projections(site, names).items():
            owners.setdefault(identity(projection), []).append((site.path, name))
    changing = {site.path for site in sites}
    for places in owners.values():
        (path, name), *others = sorted(places, key=lambda place: place[0] not in changing)
        for other, other_name in others:
            if path in changing and (inside or other != path):
                raise SwapError(
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
    """Raise SwapError unless every block is one that its family computes, with projections that can be replaced.

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
                raise SwapError(
                    f"{block.path} holds a {type(module).__name__}, which is no part of a feed-forward block of the "
                    'family: leave it out with sites=, or all blocks with parts=("heads", "query_key", "values")'
                )
            if HOOK not in vars(module):  # accelerate sets a forward on modules that it distributes
                check_forward(block.site, module)
        for module in block.modules:
            check_forward(block.site, module)
            check_projection(block.site, module)
            if places[module] > 1 or any(len(owners[id(each)]) > 1 for each in module.parameters()):
                raise SwapError(
                    f"{block.path}: a projection of this feed-forward block stands in another place, too, which would "
                    "change with it; give one a copy of its own (copy.deepcopy) first"
                )


def holders_of(block: OpenFeedForward) -> list[nn.Module]:
    """Return the module of a feed-forward block and those in it that hold its projections."""
    inside = [module for module in block.block.modules() if module not in block.modules]
    return [module for module in inside if any(part in block.modules for part in module.modules())]


def check_forward(site: Site, module: nn.Module) -> None:
    """Raise SwapError if a module's forward is overridden on the instance: it would hide a change of class."""
    if "forward" in vars(module):
        raise SwapError(
            f"{site.path} has a forward of its own, set on the instance, which would hide the new class: take it off "
            "(del module.forward), also where accelerate's remove_hook_from_module left it behind"
        )


def check_projection(site: Site, projection: nn.Module | FusedPart) -> None:
    """Raise SwapError unless a projection is a plain Linear or Conv1D with real weights, or a part of one."""
    whole = whole_of(projection)
    if type(whole) not in PLAIN or "weight" not in whole._parameters:
        raise SwapError(
            f"{site.path}: a projection is a {type(whole).__module__}.{type(whole).__name__}, not a plain "
            "nn.Linear (quantised, or with adapters): swap before quantising, or merge the adapters first"
        )
    check_weight(site, whole)


def check_weight(site: Site, projection: nn.Module) -> None:
    """Raise SwapError unless a projection has real, floating point weights."""
    weight = cast(Tensor, projection.weight)
    if weight.is_meta:
        raise SwapError(f"{site.path}: its weights are on the meta device: load the checkpoint before swapping")
    if is_quantised(weight):
        kind = type(weight).__name__ if weight.is_floating_point() else weight.dtype
        raise SwapError(f"{site.path}: its weights are {kind}, not floating point: change the model, then quantise it")


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
