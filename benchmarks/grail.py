"""GRAIL: pruning of heads and neurons in closed form, without labels, block by block.

The blocks are pruned from the first to the last, each on what the pruned blocks before it put out. Wanda's score
chooses the units: the weights of the last projection times the norm of what the unit puts out, summed over its columns.
Every layer keeps the same share of heads and of neurons. Ridge regression on the Gram matrix of all units then
reconstructs what they put out from those that stay, and this map is multiplied into the last projection.

Written from the abstract and the summaries of the paper. The authors' program has several selectors (FLAP, Wanda,
SlimGPT, magnitude); this is its Wanda, and the ridge is the program's default. Three things differ from the program: it
measures the feed-forward block of a layer before the layer's attention is pruned (ours after); it rounds heads and
neurons up (here the share of heads is the nearest to the budget, and neurons take what is left); and it measures in the
model's precision, adding a small constant to the ridge (the sum of batches and the solution are float64 here). A block
that loses nothing stays as it is.

Source: Tang, Wang, Thiele, Saukh 2026, "GRAIL: Post-hoc Compensation by Linear Reconstruction for Compressed Networks",
arXiv:2602.23795; github.com/TWWinde/GRAIL_Compensation, the part for language models.
"""

from collections.abc import Callable, Sequence

import torch
from layer_blocks import Block, blocks_of, by_unit, first_inputs, through, total_cost, units_of
from torch import Tensor

RIDGE = 1e-3  # of the mean of the Gram matrix's diagonal


def reconstructed(model, draw, budget: float, list_blocks: Callable[..., Sequence[Block]] = blocks_of):
    """Remove heads and neurons in place and return the model.

    Args:
        model: a BERT.
        draw: examples, whose labels are not used.
        budget: the share that stays of the cost of all units, the layers' multiplications.
        list_blocks: lists the blocks of a model, with other costs where the budget is another.
    """
    blocks, states = list_blocks(model), first_inputs(model, draw.unlabelled)
    counts = even_counts(blocks, budget)
    for block in blocks:
        if counts[block.is_attention] < block.count:
            gram = gram_matrix(block, states)
            kept = selected(block, gram, counts[block.is_attention])
            block.keep(kept, compensated(block, gram, kept))
        states = through(block, states)
    return model


def even_counts(blocks: Sequence[Block], budget: float) -> dict[bool, int]:
    """Return how many heads and how many neurons each layer keeps: True -> heads, False -> neurons.

    The share of heads is the nearest to the budget; neurons take what is left.
    """
    attention, feed_forward = blocks[:2]
    heads = max(1, round(budget * attention.count))
    left = budget * total_cost(blocks[:2]) - heads * attention.cost
    return {True: heads, False: min(max(0, int(left / feed_forward.cost)), feed_forward.count)}


def gram_matrix(block: Block, states) -> Tensor:
    """Return the sum over tokens of products of what units put out: [units * width, units * width], float64."""
    return sum((units.T @ units).double() for units, _ in units_of(block, states))


def selected(block: Block, gram: Tensor, count: int) -> Tensor:
    """Return the units with the largest weights times norm, ascending."""
    columns = block.output.dense.weight.abs().sum(0) * gram.diagonal().sqrt()
    return by_unit(columns, block.width).topk(count).indices.sort().values


@torch.no_grad()
def compensated(block: Block, gram: Tensor, kept: Tensor) -> Tensor:
    """Return the last projection for the units that stay: [D, kept * width]."""
    columns = block.columns(kept)
    among = gram[columns][:, columns]
    ridge = RIDGE * among.diagonal().mean() * torch.eye(len(columns)).double()
    reconstruction = torch.linalg.solve(among + ridge, gram[columns])  # [kept * width, units * width]
    return block.output.dense.weight.double() @ reconstruction.T
