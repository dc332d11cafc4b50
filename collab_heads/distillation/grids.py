"""Train weights that stay on their grids (`layers.weight_grid`): weights straight through the rounding, and scales.

A weight is its code times the scale of its block. Behind each code is a number that is not rounded. The optimizer moves
it by the gradient of the code, as if there were no rounding (the straight-through estimator of Bengio, Léonard,
Courville 2013, arXiv:1308.3432), so a code changes when many steps agree that it should. A scale moves by its own
gradient, and takes all weights of the block with it.

Shapes: D outputs, n inputs, K blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.layers.layout import is_transposed
from collab_heads.layers.weight_grid import GridWeights, codes_of, in_blocks, on_grid, over_blocks


@dataclass
class TrainedGrid:
    """A weight that is trained on its grid.

    Attributes:
        codes: [D, n], float32, not rounded.
        scales: [D, K], float32; they are rounded to half precision where they are used.
        bits: the bits of a code.
        is_transposed: whether the parameter is [n, D].
    """

    codes: Tensor
    scales: Tensor
    bits: int
    is_transposed: bool

    def on_grid(self) -> GridWeights:
        """Return the rounded weights."""
        whole = codes_of(self.bits)
        return GridWeights(self.codes.round().clamp(whole[0], whole[-1]).to(torch.int8), self.scales.half(), self.bits)

    def shown(self) -> Tensor:
        """Return the rounded weights, stored as the parameter is."""
        return self.stored(self.on_grid().weight())

    def stored(self, matrix: Tensor) -> Tensor:
        """Turn [D, n] into what the parameter stores, or back."""
        return matrix.mT if self.is_transposed else matrix

    def take(self, gradient: Tensor) -> None:
        """Take the gradient of the parameter: those of codes and scales follow from it.

        A code beyond the last one gets none: only the scale can move its weight.
        """
        given, grid, whole = self.stored(gradient), self.on_grid(), codes_of(self.bits)
        is_within = (self.codes >= whole[0] - 0.5) & (self.codes <= whole[-1] + 0.5)
        self.codes.grad = given * over_blocks(grid.scales, given.shape[1]) * is_within
        self.scales.grad = in_blocks(given * grid.codes, self.bits).sum(-1)


def trained_grids(model: PreTrainedModel, trained: Mapping[str, nn.Parameter]) -> dict[str, TrainedGrid]:
    """Return the weights that lie on grids, by name, of those that are trained."""
    found, names = {}, {id(parameter): name for name, parameter in trained.items()}
    for _, module, grid in on_grid(model):
        weight = module.weight
        assert isinstance(weight, Tensor)
        if (name := names.get(id(weight))) is not None and grid is not None:
            found[name] = TrainedGrid(grid.codes.float(), grid.scales.float(), grid.bits, is_transposed(module))
    return found
