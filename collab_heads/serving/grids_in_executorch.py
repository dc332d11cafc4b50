"""Weights of eight bits in ExecuTorch: XNNPACK rounds states to eight bits, and multiplies them by codes in integers.

Each row of a weight has one scale, as on the grid of eight bits, so weights that lie there are written as they are. Its
grid of four bits has scales of another type (bfloat16), none of which may be negative: no weight on ours lies there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from collab_heads.fitting.weight_grid import nearest_on_grid
from collab_heads.layers.weight_grid import OF_ROWS, GridWeights, bits_of


@contextmanager
def in_eight_bits(model: nn.Module) -> Iterator[int]:
    """Hold the weights of linear maps in eight bits while the context is open, but for those on grids of fewer.

    Yields:
        The number of maps that have eight bits.
    """
    before = dict[nn.Linear, Any]()
    try:
        for module in model.modules():
            if is_integer(module):
                before[module] = module.weight
                module.weight = nn.Parameter(integers(module.weight.detach()), requires_grad=False)
        yield len(before)
    finally:
        for module, weight in before.items():
            module.weight = weight


def is_integer(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True for a linear map whose weight can have eight bits."""
    return type(module) is nn.Linear and bits_of(module) in (None, OF_ROWS) and bool(module.weight.numel())


def integers(weight: Tensor) -> Tensor:
    """Return a weight [D, n] as codes with one positive scale a row, in the form that torchao's quantisers have.

    It multiplies inputs that are rounded to eight bits, over the range of each token.
    """
    from torchao.quantization import IntxUnpackedToInt8Tensor

    grid = GridWeights.of(weight, OF_ROWS) or nearest_on_grid(weight, OF_ROWS)
    scales = grid.scales.float()
    codes = torch.where(scales < 0, -grid.codes, grid.codes)  # from -127 to 127
    scales = torch.where(scales == 0, 1, scales.abs())  # of a row of zeros
    shape, kind = (1, weight.shape[1]), "int8_asym_per_token"
    return IntxUnpackedToInt8Tensor(
        codes, scales, torch.zeros_like(scales, dtype=torch.int8), torch.int8, shape, torch.float32, kind
    )
