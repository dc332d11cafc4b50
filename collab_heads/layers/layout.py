"""Storage layouts of projections: [out, in] as nn.Linear, or [in, out] as the Conv1D of GPT-2.

A stored layout never changes: a transposed square matrix under a stock name would load, and be wrong. So all code that
reads or writes the weight of a projection that may be a Conv1D does it here, as [out, in].
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

PLAIN: tuple[type[nn.Module], ...] = (nn.Linear, Conv1D)  # they only multiply and add a bias
# class -> the attributes of its widths, in and out; all other classes have those of nn.Linear
WIDTHS: dict[type[nn.Module], tuple[str, str]] = {Conv1D: ("nx", "nf")}
LINEAR_WIDTHS = ("in_features", "out_features")


def is_transposed(module: nn.Module) -> bool:
    """Return True if a projection stores its weight as [in, out]."""
    return isinstance(module, Conv1D) or getattr(module, "stores_transposed", False)


def is_quantised(weight: Tensor) -> bool:
    """Return True if a weight is stored as other numbers: as integers (bitsandbytes) or in its own class (torchao).

    A tensor of such a class claims to be floating point. A DTensor holds the numbers themselves, or a part of them.
    """
    is_plain = type(weight) in (Tensor, nn.Parameter) or is_dtensor(weight)
    return not (is_plain and weight.is_floating_point())


def is_dtensor(weight: Tensor) -> bool:
    """Return True if a process may hold only a part of a weight: FSDP 2, or tensor parallelism."""
    return any(base.__name__ == "DTensor" for base in type(weight).__mro__)


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a projection as [out, in]: its parameter, or a view of it that can be written to."""
    weight = cast(Tensor, module.weight)
    return weight.mT if is_transposed(module) else weight


def set_weight(module: Any, weight: Tensor, *, requires_grad: bool) -> None:
    """Give a projection another weight, of any width, with its own memory.

    Args:
        module: the projection; its width attributes are updated.
        weight: [out, in], in the dtype and on the device that the parameter should have.
        requires_grad: of the new parameter.
    """
    stored = weight.mT if is_transposed(module) else weight
    module.weight = nn.Parameter(stored.detach().clone(memory_format=torch.contiguous_format), requires_grad)
    set_widths(module, weight.shape[1], weight.shape[0])


def write_weight(module: Any, weight: Tensor) -> None:
    """Give the weight of a projection other values: the parameter stays the same object, in other memory.

    Copies that share the old memory (`apply_state.undone`) are not affected.

    Args:
        module: the projection.
        weight: [out, in], of the same shape; its own memory is used if it is stored as the parameter is.
    """
    stored = weight.mT if is_transposed(module) else weight
    module.weight.data = stored.detach().to(module.weight).contiguous()


def names_of_widths(module: nn.Module) -> tuple[str, str]:
    """Return the names of a projection's width attributes, in and out."""
    return next((names for cls, names in WIDTHS.items() if isinstance(module, cls)), LINEAR_WIDTHS)


def widths(module: nn.Module) -> tuple[int, int]:
    """Return the widths of a projection, in and out, as its attributes give them."""
    dim_in, dim_out = (cast(int, getattr(module, name)) for name in names_of_widths(module))
    return dim_in, dim_out


def set_widths(module: nn.Module, dim_in: int, dim_out: int) -> None:
    """Set the width attributes of a projection, under the names that its class uses."""
    for name, width in zip(names_of_widths(module), (dim_in, dim_out), strict=True):
        setattr(module, name, width)


def become(module: nn.Module, cls: type[nn.Module]) -> None:
    """Change the class of a projection in place; its width attributes get the names of the new class."""
    dims = widths(module)
    for name in names_of_widths(module):
        delattr(module, name)
    module.__class__ = cls
    set_widths(module, *dims)
