"""Train weights that stay on their grids (`layers.weight_grid`): weights straight through the rounding, and scales.

The model has the rounded weights. The gradient of a rounded weight moves the weight behind it, which is not rounded, as
if there were no rounding (the straight-through estimator of Bengio, Léonard, Courville 2013, arXiv:1308.3432). The
scale of a block moves by the gradient of Esser et al. 2020, "Learned step size quantization", arXiv:1902.08153. So a
code changes only when many steps agree that it should.

Shapes: D outputs, n inputs, K blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.errors import ArgumentError
from collab_heads.layers.layout import is_transposed
from collab_heads.layers.weight_grid import GridWeights, codes_of, in_blocks, nearest_codes, on_grid, over_blocks


@dataclass
class TrainedGrid:
    """A weight that is trained on its grid.

    Attributes:
        weight: [D, n], float32, not rounded.
        scales: [D, K], float32; they are rounded to half precision where they are used.
        bits: the bits of a code.
        is_transposed: whether the parameter is [n, D].
    """

    weight: Tensor
    scales: Tensor
    bits: int
    is_transposed: bool

    def on_grid(self) -> GridWeights:
        """Return the points of the grid that are nearest to the weights."""
        scales = self.scales.half()
        codes = nearest_codes(self.weight, over_blocks(scales, self.weight.shape[1]), self.bits)
        return GridWeights(codes.to(torch.int8), scales, self.bits)

    def shown(self) -> Tensor:
        """Return the rounded weights, stored as the parameter is."""
        return self.stored(self.on_grid().weight())

    def stored(self, matrix: Tensor) -> Tensor:
        """Turn [D, n] into what the parameter stores, or back."""
        return matrix.mT if self.is_transposed else matrix

    def take(self, gradient: Tensor) -> None:
        """Take the gradient of the parameter: those of weights and scales follow from it.

        A weight beyond the last code gets none: only the scale can move it.
        """
        given, grid = self.stored(gradient), self.on_grid()
        exact = (self.weight / over_blocks(grid.scales, self.weight.shape[1])).nan_to_num(0.0, 0.0, 0.0)
        codes = codes_of(self.bits)
        is_within = (exact >= codes[0] - 0.5) & (exact <= codes[-1] + 0.5)
        self.weight.grad = given * is_within
        self.scales.grad = in_blocks(given * (grid.codes - exact * is_within)).sum(-1)


def trained_grids(model: PreTrainedModel, trained: Mapping[str, nn.Parameter]) -> dict[str, TrainedGrid]:
    """Return the weights that lie on grids, by name, of those that are trained.

    Raises:
        ArgumentError: if one was loaded in another dtype, in which it cannot stay there.
    """
    found, names = {}, {id(parameter): name for name, parameter in trained.items()}
    for _, module, grid in on_grid(model):
        weight = module.weight
        assert isinstance(weight, Tensor)
        if (name := names.get(id(weight))) is None:
            continue
        if weight.dtype != torch.float32:
            raise ArgumentError(
                f"{name} has few bits, and is in {weight.dtype}, which moves it off its grid: load the model in float32"
            )
        if grid is not None:
            stored = is_transposed(module)
            latent = (weight.mT if stored else weight).detach().clone(memory_format=torch.contiguous_format)
            found[name] = TrainedGrid(latent, grid.scales.float(), grid.bits, stored)
    return found
