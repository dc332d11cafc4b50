"""Find the optimizer state that must move with the rows of a parameter: Adam's moments, SGD's momentum."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.errors import ArgumentError, ModelStateError

# Optimizers that keep a part, or flat copies, of the parameters. By name, so that no optional package is imported.
_SHARDED = {
    "ZeroRedundancyOptimizer": "it keeps the moments of other ranks' parameters elsewhere",
    "OSS": "it keeps the moments of other ranks' parameters elsewhere",
    "DeepSpeedOptimizerWrapper": "DeepSpeed keeps flat copies of the parameters",
    "ZeROOptimizer": "DeepSpeed keeps flat copies of the parameters",
    "DeepSpeedZeroOptimizer": "DeepSpeed keeps flat copies of the parameters",
    "DeepSpeedZeroOptimizer_Stage3": "DeepSpeed keeps flat copies of the parameters",
    "BF16_Optimizer": "it keeps flat copies of the parameters",
    "FP16_Optimizer": "it keeps flat copies of the parameters",
    "FP16_UnfusedOptimizer": "it keeps copies of the parameters",
    "FSDPOptimizerWrapper": "FSDP keeps flat parts of the parameters",
    "FullyShardedOptimizer": "FSDP keeps flat parts of the parameters",
    "MegatronLMOptimizerWrapper": "Megatron-LM splits the parameters over ranks",
}


def inner_optimizer(optimizer: Any, model: PreTrainedModel) -> torch.optim.Optimizer | None:
    """Return the torch optimizer inside a wrapper (accelerate has one); None stays None.

    Args:
        optimizer: a torch optimizer, or a wrapper with the attribute `optimizer`.
        model: the model that it trains.
    """
    if optimizer is None:
        return None
    given = type(optimizer).__name__
    while True:
        for base in type(optimizer).__mro__:
            if why := _SHARDED.get(base.__name__):
                raise ArgumentError(
                    f"the optimizer is a {base.__name__}, and its state cannot follow a head: {why}; train with a "
                    "plain optimizer (DDP has one), or rotate heads before making this one"
                )
        if getattr(optimizer, "optimizer", None) is None:
            break
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"optimizer must be a torch.optim.Optimizer, or accelerate's around one, not a {given}")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in model.parameters()):
        raise ArgumentError(
            f"the optimizer, a {given}, holds no parameter of this model: pass the one that trains it, and the model "
            "that it was made for"
        )
    return optimizer


def elementwise_state(optimizer: torch.optim.Optimizer | None, parameter: Tensor, what: str) -> dict[str, Tensor]:
    """Return an optimizer's state for every element of a parameter, without copying: Adam's moments, SGD's momentum.

    Single numbers, such as the count of steps or a second moment that a whole group shares, are left out.

    Args:
        optimizer: the optimizer; None for no state.
        parameter: the parameter, or a buffer, which has none.
        what: its name, for errors.

    Returns:
        name of the state -> tensor of the parameter's shape.
    """
    states = {}
    for name, value in ({} if optimizer is None else optimizer.state.get(parameter, {})).items():
        if isinstance(value, list | tuple | dict) and any(isinstance(v, Tensor) for v in values_of(value)):
            raise ModelStateError(
                f"the optimizer's {name} of {what} is a {type(value).__name__} of tensors, in which the rows of a head "
                "cannot be found; train with AdamW or SGD, or rotate without the optimizer"
            )
        if not isinstance(value, Tensor):
            continue
        kind = "" if type(value) in (Tensor, nn.Parameter) else f"a {type(value).__name__} "
        if value.shape == parameter.shape and not kind:
            states[name] = value
        elif value.numel() > 1:
            raise ModelStateError(
                f"the optimizer's {name} of {what} is {kind}of shape {tuple(value.shape)}, the parameter's is "
                f"{tuple(parameter.shape)}: factored or quantised moments cannot follow a head; train with AdamW or "
                "SGD, or rotate without the optimizer"
            )
    return states


def values_of(container: list | tuple | dict) -> Iterable[object]:
    return container.values() if isinstance(container, dict) else container
