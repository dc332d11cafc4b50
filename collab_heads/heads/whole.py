"""Keep gates and alphas whole on every process where FSDP 2 divides the other weights.

They are small, and their training reads all of them: the number of open heads, a nuclear norm. FSDP ignores them, so
their gradients are averaged here.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor

from collab_heads.base.processes import copy_from_first
from collab_heads.errors import ArgumentError
from collab_heads.layers.alphas import HeadAlphas
from collab_heads.layers.gates import HeadGates

if TYPE_CHECKING:
    from accelerate import Accelerator  # an optional dependency

WHOLE = (HeadGates, HeadAlphas)  # modules whose parameters are not divided


def is_sharded(accelerator: "Accelerator") -> bool:
    """Return True if FSDP divides weights among processes."""
    return accelerator.distributed_type == "FSDP"


def is_divided(model: nn.Module) -> bool:
    """Return True if a process holds only a part of some weights: FSDP 2, or tensor parallelism."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def check_version(accelerator: "Accelerator") -> None:
    """Raise ArgumentError for FSDP 1."""
    if is_sharded(accelerator) and accelerator.state.fsdp_plugin.fsdp_version != 2:
        raise ArgumentError(
            "FSDP 1 flattens weights into parts in which there are no heads: use FSDP 2 (fsdp_version: 2, "
            "--fsdp_version 2, or fsdp_config={'version': 2}), or DDP"
        )


def keep_whole(accelerator: "Accelerator", model: nn.Module) -> None:
    """Tell FSDP which parameters not to divide, and give every process the weights of the first one.

    Call it before Accelerate prepares the model. DDP copies the weights of the first process, FSDP 2 does not: it would
    join parts of different models. Does nothing without FSDP.

    Raises:
        ArgumentError: if this process has not loaded all weights.
    """
    if not is_sharded(accelerator):
        return
    if missing := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise ArgumentError(
            f"{missing[0]} is on the meta device in process {accelerator.process_index}: load the model whole in every "
            "process (fsdp_cpu_ram_efficient_loading: false, or FSDP_CPU_RAM_EFFICIENT_LOADING=false)"
        )
    plugin: Any = accelerator.state.fsdp_plugin
    whole = list(whole_modules(model))
    for module in whole:
        module.to(accelerator.device)  # FSDP moves what it divides
    plugin.ignored_modules = [*ignored_before(plugin.ignored_modules, model), *whole] or None
    plugin.cpu_ram_efficient_loading = False  # it broadcasts divided weights only
    weights = (*model.parameters(), *model.buffers())
    copy_from_first(accelerator, (each for each in weights if not isinstance(each, DTensor)))


def ignored_before(ignored: Any, model: nn.Module) -> list[nn.Module]:
    """Return the modules that FSDP ignores already, given as a pattern of their paths or as modules."""
    if isinstance(ignored, str):
        return [module for path, module in model.named_modules() if re.fullmatch(ignored, path)]
    return [module for module in ignored or () if not isinstance(module, WHOLE)]


def average_whole(accelerator: "Accelerator", model: nn.Module) -> None:
    """Average the gradients of parameters that are not divided, as FSDP does for the others."""
    if not is_sharded(accelerator):
        return
    for module in whole_modules(model):
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad = accelerator.reduce(parameter.grad, "mean")


def whole_modules(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, WHOLE))
