"""How a projection stores its matrix: [out, in] as nn.Linear does, or [in, out] as the Conv1D of GPT-2.

A stored layout never changes: under a stock name a square matrix that lies the other way would load, and be wrong. So
whatever reads or writes the weight of a projection that may be a Conv1D does it here, as [out, in].
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

PLAIN: tuple[type[nn.Module], ...] = (nn.Linear, Conv1D)  # they multiply, add a bias, and do nothing else
# class -> the names of its widths, in and out; all others have those of nn.Linear
WIDTHS: dict[type[nn.Module], tuple[str, str]] = {Conv1D: ("nx", "nf")}
LINEAR_WIDTHS = ("in_features", "out_features")


def is_transposed(module: nn.Module) -> bool:
    """Whether a projection stores its weight as [in, out]."""
    return isinstance(module, Conv1D) or getattr(module, "stores_transposed", False)


def is_quantised(weight: Tensor) -> bool:
    """Whether a weight is stored as other numbers: as integers (bitsandbytes), or in a class of its own (torchao).

    A tensor of such a class says that it is floating point. A DTensor holds the numbers themselves, or a part of them.
    """
    is_plain = type(weight) in (Tensor, nn.Parameter) or is_dtensor(weight)
    return not (is_plain and weight.is_floating_point())


def is_dtensor(weight: Tensor) -> bool:
    """Return True if a process may hold only a part of a weight: FSDP 2, or tensor parallelism."""
    return any(base.__name__ == "DTensor" for base in type(weight).__mro__)


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a projection as [out, in]: its parameter, or a view of that, through which it can be changed."""
    weight = cast(Tensor, module.weight)
    return weight.mT if is_transposed(module) else weight


def set_weight(module: Any, weight: Tensor, *, requires_grad: bool) -> None:
    """Give a projection another weight, of any width, in memory of its own.

    Args:
        module: the projection; it says then that it has these widths.
        weight: [out, in], in the dtype and on the device that it is to have.
        requires_grad: of the new parameter.
    """
    stored = weight.mT if is_transposed(module) else weight
    module.weight = nn.Parameter(stored.detach().clone(memory_format=torch.contiguous_format), requires_grad)
    set_widths(module, weight.shape[1], weight.shape[0])


def names_of_widths(module: nn.Module) -> tuple[str, str]:
    """The attributes of a projection that say how wide it is, in and out."""
    return next((names for cls, names in WIDTHS.items() if isinstance(module, cls)), LINEAR_WIDTHS)


def widths(module: nn.Module) -> tuple[int, int]:
    """The widths in and out that a projection says it has."""
    dim_in, dim_out = (cast(int, getattr(module, name)) for name in names_of_widths(module))
    return dim_in, dim_out


def set_widths(module: nn.Module, dim_in: int, dim_out: int) -> None:
    """Let a projection say that it has these widths, under the names that its class has for them."""
    for name, width in zip(names_of_widths(module), (dim_in, dim_out), strict=True):
        setattr(module, name, width)


def become(module: nn.Module, cls: type[nn.Module]) -> None:
    """Change the class of a projection in place; its widths have the names of the new class then."""
    dims = widths(module)
    for name in names_of_widths(module):
        delattr(module, name)
    module.__class__ = cls
    set_widths(module, *dims)
