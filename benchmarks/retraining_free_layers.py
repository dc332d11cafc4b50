"""Pruning of heads and neurons without retraining, with labels: Kwon et al. 2022, written from the paper.

Every head and every neuron has a mask, a factor on its output. There are three steps. First, those with the largest
diagonal of the Fisher information of the masks stay: for every number of heads, the best heads and as many of the best
neurons as the budget of operations allows, over the whole model; the pair with the largest sum is taken. Second, units
of a block change places while that lowers the loss, as estimated by the block's part of the Fisher information. Third,
the masks that are left are fitted block by block by LSMR with a damping of 1, so that the output of the block matches
that of the original model; the last block is fitted at the first token, which is all that the classifier reads. The
fit ends where a mask leaves [-10, 10]. The masks are then multiplied into the last projections.

Left out: budgets of latency. The published program takes gradients of batches of 32 for the Fisher information, and a
model that is pruned halfway as the target of the fit; here, as in the paper, gradients are of examples, and the target
is the original.

Source: Kwon, Kim, Mahoney, Hassoun, Keutzer, Gholami 2022, arXiv:2204.09656; github.com/WoosukKwon/
retraining-free-pruning.
"""

from collections.abc import Mapping, Sequence

import torch
from layer_blocks import Block, block_outputs, blocks_of, by_unit, first_inputs, through, total_cost, units_of
from retraining_free import DAMPING, LARGEST
from scipy.sparse.linalg import lsmr
from torch import Tensor

BATCH = 32  # examples whose gradients are averaged
CONVERGED = 3  # LSMR's reasons to stop below this one are solutions
ITERATIONS = 5  # at most, per unknown: what CuPy's LSMR allows, with which the authors solve


def retraining_free_layers(model, draw, budget: float):
    """Remove heads and neurons in place and return the model.

    Args:
        model: a BERT with a classifier.
        draw: labelled examples.
        budget: the share of the layers' multiplications that stays.
    """
    blocks = blocks_of(model)
    gradients = draw.once("gradients of masks", lambda: in_batches(mask_gradients(model, draw.batches), draw.number))
    targets = draw.once("outputs of blocks", lambda: block_outputs(model, draw.batches))
    masks = searched(blocks, [each.square().mean(0) for each in gradients], budget * total_cost(blocks))
    for block, mask, of_block in zip(blocks, masks, gradients, strict=True):
        block.keep(rearranged(mask, of_block).nonzero().flatten())
    tune(model, blocks, draw.batches, targets)
    return model


def mask_gradients(model, batches: Sequence[Mapping]) -> list[Tensor]:
    """Return the gradient of every example's loss with respect to the masks: block -> [examples, units]."""
    blocks, masks = blocks_of(model), []
    found: list[list[Tensor]] = [[] for _ in blocks]

    def masked(block: Block):
        def hook(module, inputs):
            masks.append(torch.ones(len(inputs[0]), block.count, requires_grad=True))
            return (inputs[0] * masks[-1].repeat_interleave(block.width, dim=1)[:, None],)  # [B, T, units * width]

        return hook

    hooks = [block.output.dense.register_forward_pre_hook(masked(block)) for block in blocks]
    for batch in batches:
        masks.clear()
        loss = model(**batch).loss * len(batch["labels"])  # the sum: each example has masks of its own
        for of_block, gradient in zip(found, torch.autograd.grad(loss, masks), strict=True):
            of_block.append(gradient)
    for hook in hooks:
        hook.remove()
    return [torch.cat(of_block) for of_block in found]


def in_batches(gradients: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Average the gradients over random batches: block -> [batches, units]."""
    order = torch.randperm(len(gradients[0]), generator=torch.Generator().manual_seed(seed))
    return [torch.stack([part.mean(0) for part in each[order].split(BATCH)]) for each in gradients]


def searched(blocks: Sequence[Block], fisher: Sequence[Tensor], most: float) -> list[Tensor]:
    """Keep the heads and neurons with the largest sum of the Fisher information's diagonal within a cost.

    Args:
        blocks: the blocks.
        fisher: the diagonal of each block: [units].
        most: the cost that all units together may have.

    Returns:
        Masks of 0 and 1: block -> [units].
    """
    kinds = [[i for i, block in enumerate(blocks) if block.is_attention is kind] for kind in (True, False)]
    costs = [blocks[of_kind[0]].cost for of_kind in kinds]
    ranked = [torch.cat([fisher[i] for i in of_kind]).sort(descending=True) for of_kind in kinds]
    sums = [torch.cat([torch.zeros(1).double(), values.double().cumsum(0)]) for values, _ in ranked]
    counts = [
        (heads, min(int((most - heads * costs[0]) / costs[1]), len(ranked[1].values)))
        for heads in range(1, len(ranked[0].values) + 1)
        if heads * costs[0] <= most
    ]
    best = max(counts, key=lambda pair: float(sums[0][pair[0]] + sums[1][pair[1]]))
    masks: list[Tensor] = [torch.zeros(0)] * len(blocks)
    for of_kind, (values, order), count in zip(kinds, ranked, best, strict=True):
        flat = torch.zeros_like(values).index_fill(0, order[:count], 1.0)
        for i, mask in zip(of_kind, flat.split([len(fisher[i]) for i in of_kind]), strict=True):
            masks[i] = mask
    return masks


def rearranged(mask: Tensor, gradients: Tensor) -> Tensor:
    """Exchange kept and removed units of a block where this lowers the estimated loss; the number kept stays the same.

    Args:
        mask: [units] of 0 and 1.
        gradients: [batches, units].
    """
    fisher = gradients.double().T @ gradients.double()
    diagonal, gone = fisher.diagonal(), mask == 0
    if not gone.any():
        return mask
    sums = fisher[:, gone].sum(1)
    for unit in [i for i in diagonal.argsort().tolist() if mask[i]]:
        gone[unit], sums = True, sums + fisher[unit]
        # (1 - m)^T I (1 - m) without unit i, less what is the same for all i
        back = int(torch.where(gone, diagonal - 2 * sums, torch.inf).argmin())
        gone[back], sums = False, sums - fisher[back]
    return (~gone).to(mask)


@torch.no_grad()
def tune(model, blocks: Sequence[Block], batches: Sequence[Mapping], targets: Sequence[Sequence[Tensor]]) -> None:
    """Fit a factor for each unit, block by block, each after those before it, and multiply it into weights."""
    states, first = first_inputs(model, batches), []
    for _, _, real in states:
        rows = torch.zeros_like(real)
        rows[:, 0] = True
        first.append(rows[real])  # among the real tokens, those that come first in their text
    for block, of_block in zip(blocks, targets, strict=True):
        if block.count and block is not blocks[0]:
            seen = zip(units_of(block, states), of_block, strict=True)
            pairs = [(units, target - hidden) for (units, hidden), target in seen]
            if block is blocks[-1]:
                pairs = [(units[rows], wanted[rows]) for (units, wanted), rows in zip(pairs, first, strict=True)]
            factors = fitted(block, pairs)
            if factors is None:
                return
            block.output.dense.weight.mul_(factors.repeat_interleave(block.width))
        states = through(block, states)


def fitted(block: Block, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor | None:
    """Return the factors that bring the output of a block closest to a desired one, or None if the fit failed.

    Args:
        block: the block.
        pairs: batch -> what its units put out, [tokens, units * width], and the desired output, [tokens, D].
    """
    dense = block.output.dense
    weight = dense.weight.double()
    moments = sum((units.T @ units).double() for units, _ in pairs)
    with_wanted = sum(((wanted - dense.bias).T @ units).double() for units, wanted in pairs)
    products = by_unit(by_unit((weight.T @ weight) * moments, block.width).T, block.width)
    right = by_unit((weight * with_wanted).sum(0), block.width)
    step, reason, *_ = lsmr(
        products.numpy(), (right - products.sum(1)).numpy(), DAMPING, maxiter=ITERATIONS * len(right)
    )
    factors = torch.from_numpy(step).to(dense.weight) + 1
    return factors if reason < CONVERGED and bool((factors.abs() <= LARGEST).all()) else None
