"""A step that `compress` does not have: refit every last projection to the original, block by block, without labels.

The blocks are refitted from the first to the last. Each sees what the refitted blocks before it put out, and is fitted
to the output that it had in the original, with the residual added: ridge regression around the present weights, bias
included.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from layer_blocks import Block, block_outputs, blocks_of, first_inputs, through, units_of

RIDGE = 1e-2  # of the mean square of what units put out


@torch.no_grad()
def refitted(model, original, batches: Sequence[Mapping]):
    """Return a copy of a smaller BERT with refitted last projections.

    Args:
        model: the smaller model.
        original: the model that it was.
        batches: inputs without labels.
    """
    model, targets = copy.deepcopy(model), block_outputs(original, batches)
    states = first_inputs(model, batches)
    for block, target in zip(blocks_of(model), targets, strict=True):
        dense = block.output.dense
        if isinstance(dense, torch.nn.Linear) and dense.in_features:  # what lost all units is a constant
            fit(block, states, target)
        states = through(block, states)
    return model


def fit(block: Block, states, targets: Sequence[torch.Tensor]) -> None:
    """Refit the last projection of a block, in place, to outputs: batch -> [tokens, D]."""
    dense = block.output.dense
    present = torch.cat([dense.weight.T, dense.bias[None]]).double()  # [units + 1, D]
    moments, right = torch.zeros(len(present), len(present)).double(), torch.zeros_like(present)
    for (units, hidden), target in zip(units_of(block, states), targets, strict=True):
        seen = torch.cat([units, torch.ones(len(units), 1)], dim=1)
        moments += (seen.T @ seen).double()
        right += (seen.T @ (target - hidden)).double()
    ridge = RIDGE * moments.diagonal()[:-1].mean() * torch.eye(len(present)).double()
    ridge[-1, -1] = 0  # the bias is free
    solution = torch.linalg.solve(moments + ridge, right + ridge @ present)
    dense.weight.copy_(solution[:-1].T)
    dense.bias.copy_(solution[-1])
