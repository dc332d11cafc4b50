"""Try a change of some sites in the model itself, and take it back."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from collab_heads.model.open_site import OpenSite, open_sites
from collab_heads.model.settling import settle
from collab_heads.record import FIELD


@contextmanager
def undone(model: PreTrainedModel, sites: Sequence[OpenSite]) -> Iterator[None]:
    """Whatever is done to some sites of a model, and to its record, is undone when the context ends, also on an error.

    While it is open, copies stand in the places of their modules, so that the modules themselves stay as they are.
    Sites that were opened before hold those: open them again inside.

    Args:
        model: the model.
        sites: those that may change, opened before or in another such context.
    """
    settle(model)
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            places.setdefault(child, []).append((parent, name))
    paths = {site.path for site in sites}
    now = [site for site in open_sites(model, sites[0].adapter) if site.path in paths] if sites else []
    originals = list(dict.fromkeys(module for site in now for module in (site.module, site.output)))
    stacks = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    records = [(stack.config, getattr(stack.config, FIELD, None)) for stack in stacks]
    shared = [stack.config for stack in stacks] + [hook for module in originals for hook in hooks_of(module)]
    memo = {id(each): each for each in shared}  # of the model, and of the user: a copy shares them
    copies = {module: copy.deepcopy(module, memo) for module in originals}
    try:
        for module, replacement in copies.items():
            for parent, name in places[module]:  # an output projection may be inside its attention module
                setattr(parent, name, replacement)
        yield
    finally:
        for module in originals:
            for parent, name in places[module]:
                setattr(parent, name, module)
        for config, record in records:
            if record is not None:
                setattr(config, FIELD, record)
            elif hasattr(config, FIELD):
                delattr(config, FIELD)


def hooks_of(module: nn.Module) -> list[object]:
    """The hooks of a module and of those in it. One may belong to any object, which need not allow to be copied."""
    tables = [table for each in module.modules() for name, table in vars(each).items() if name.endswith("_hooks")]
    return [hook for table in tables for hook in table.values()]
