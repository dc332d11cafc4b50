"""K-prune: pruning of heads and neurons without labels, block by block, by the knowledge that each unit holds.

The blocks are pruned from the first to the last. Before each, all units of the blocks that are left are measured: their
predictive knowledge is the squared gradient, halved, of the divergence between the present and the original
prediction; their representational knowledge is the squared norm of what they add to the output of the block. The units
with the lowest sum per operation are those to remove under the budget that is left, over all these blocks; of them,
those of the block at hand go. Its last projection is then fitted by least squares to the output that the block had in
the original model. A block that loses all units loses its bias, too.

The numbers are those of the authors' script: weights 1 and 2.5e-4 of the two kinds of knowledge, 64 on heads, and a
temperature of 2; gradients are of batches of 32, as in their program. Left out: any search for better weights by task.
Three things differ from the program: the squared error of a regression is taken per example, the least squares are
solved in float64, and where all units that are left fit into the budget, all stay (the program removes the last one).

Source: Park, Choi, Kang 2024, "Accurate Retraining-free Pruning for Pretrained Encoder-based Language Models",
arXiv:2308.03449; github.com/snudm-starlab/K-prune.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from layer_blocks import Block, States, blocks_of, by_unit, first_inputs, outputs_of, through, total_cost, units_of
from torch import Tensor
from torch.nn import functional

PREDICTIVE, REPRESENTATIONAL, HEADS, TEMPERATURE = 1.0, 2.5e-4, 64.0, 2.0
PIECE = 8  # examples that pass together, of a batch whose gradients are added before they are squared


def classes(model, hidden: Tensor, real: Tensor) -> Tensor:
    """Compute the logits of a classifier from the output of the last layer: [B, T, D] -> [B, classes]."""
    return model.classifier(model.base_model.pooler(hidden))


def embeddings(model, hidden: Tensor, real: Tensor) -> Tensor:
    """Compute the vectors of sentences, of length 1, from the output of the last layer: [B, T, D] -> [B, D]."""
    return functional.normalize((hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True), dim=-1)


def divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the divergence of a prediction from a desired one: Kullback-Leibler, or squared for a regression."""
    if logits.shape[-1] == 1:
        return functional.mse_loss(logits, wanted)
    present, target = (functional.log_softmax(each / TEMPERATURE, dim=-1) for each in (logits, wanted))
    return functional.kl_div(present, target, reduction="batchmean", log_target=True) * TEMPERATURE**2


def distance(vectors: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean squared distance of sentences' vectors from desired ones."""
    return (vectors - wanted).square().sum(-1).mean()


@dataclass(frozen=True)
class Prediction:
    """Computes the prediction of a model, and its distance from the original's.

    Attributes:
        of: computes it from the model, the output of its last layer and the real tokens.
        gap: compares it with a desired one.
    """

    of: Callable[[object, Tensor, Tensor], Tensor] = classes
    gap: Callable[[Tensor, Tensor], Tensor] = divergence


def k_pruned(
    model,
    draw,
    budget: float,
    prediction: Prediction = Prediction(),
    list_blocks: Callable[..., Sequence[Block]] = blocks_of,
):
    """Remove heads and neurons in place and return the model.

    Args:
        model: a BERT with a classifier, or any other whose prediction is given.
        draw: examples, whose labels are not used.
        budget: the share that stays of the cost of all units, the layers' multiplications.
        prediction: what the model predicts.
        list_blocks: lists the blocks of a model, with other costs where the budget is another.
    """
    model.requires_grad_(False)
    blocks, originals = list_blocks(model), list_blocks(copy.deepcopy(model))
    states = wanted_states = first_inputs(model, draw.unlabelled)
    wanted = draw.once("predictions", lambda: predictions(model, draw.unlabelled, prediction))
    left = budget * total_cost(blocks)
    for number, (block, original) in enumerate(zip(blocks, originals, strict=True)):
        rest = blocks[number:]
        if number:
            scores = knowledge(model, rest, states, wanted, prediction)
        else:
            scores = draw.once("knowledge", lambda: knowledge(model, blocks, states, wanted, prediction))  # noqa: B023
        kept = (scores[0] > threshold(rest, scores, left)).nonzero().flatten()
        left -= len(kept) * block.cost
        block.keep(kept)
        tune(block, states, outputs_of(original, wanted_states))
        states, wanted_states = through(block, states), through(original, wanted_states)
    return model


@torch.no_grad()
def predictions(model, batches: Sequence[Mapping], prediction: Prediction) -> list[Tensor]:
    """Return the prediction for every batch."""
    return [
        prediction.of(model, model.base_model(**batch).last_hidden_state, batch["attention_mask"].bool())
        for batch in batches
    ]


def knowledge(
    model, blocks: Sequence[Block], states: States, predicted: Sequence[Tensor], prediction: Prediction
) -> list[Tensor]:
    """Return the knowledge of units per operation: block -> [units].

    Args:
        model: the model.
        blocks: its last blocks, those that are not pruned yet.
        states: the input of the first of them.
        predicted: batch -> the prediction of the original model.
        prediction: what the model predicts.
    """
    predictive = [torch.zeros(block.count * block.width) for block in blocks]
    norms = [torch.zeros(block.count * block.width) for block in blocks]
    examples = tokens = 0
    for state, of_batch in zip(states, predicted, strict=True):
        summed = [torch.zeros_like(total) for total in predictive]
        for hidden, mask, real, wanted in pieces(*state, of_batch):
            masks = []
            for block, norm in zip(blocks, norms, strict=True):
                masks.append(torch.ones(block.count * block.width, requires_grad=True))
                units = block.units(hidden, mask)
                norm += units.detach()[real].square().sum(0)
                hidden = block.output(units * masks[-1], hidden)
            loss = prediction.gap(prediction.of(model, hidden, real), wanted) * len(wanted) / len(of_batch)
            for total, gradient in zip(summed, torch.autograd.grad(loss, masks), strict=True):
                total += gradient
            tokens += int(real.sum())
        for total, gradient in zip(predictive, summed, strict=True):
            total += gradient.square() / 2
        examples += len(of_batch)
    found = []
    for block, gradients, norm in zip(blocks, predictive, norms, strict=True):
        columns = PREDICTIVE * gradients / examples
        columns += REPRESENTATIONAL * norm * block.output.dense.weight.square().mean(0) / tokens
        factor = HEADS if block.is_attention else 1.0
        found.append(factor * by_unit(columns, block.width, torch.mean) / block.cost)
    return found


def pieces(hidden: Tensor, mask: Tensor | None, real: Tensor, wanted: Tensor) -> Iterator[tuple]:
    """Yield the examples of a batch, those of like length together, without padding that none of them needs."""
    for rows in real.sum(1).argsort().split(PIECE):
        length = int(real[rows].any(0).nonzero().max()) + 1
        own_mask = None if mask is None else mask[rows][..., :length, :length]  # a row of queries, or one for each
        yield hidden[rows, :length], own_mask, real[rows, :length], wanted[rows]


def threshold(blocks: Sequence[Block], scores: Sequence[Tensor], left: float) -> float:
    """Return the smallest score such that the units above it cost less than what is left; -inf if all units fit."""
    if total_cost(blocks) <= left:
        return -float("inf")
    values, order = torch.cat(list(scores)).double().sort()
    costs = torch.cat([torch.full((len(each),), block.cost) for block, each in zip(blocks, scores, strict=True)])[order]
    above = costs.sum() - costs.cumsum(0)
    fits = (above < left).nonzero().flatten()
    return float(values[fits[0]]) if len(fits) else float("inf")


@torch.no_grad()
def tune(block: Block, states: States, targets: Iterable[Tensor]) -> None:
    """Fit the last projection of a block to outputs: batch -> [tokens, D], with the residual added."""
    dense = block.output.dense
    if not block.count:
        dense.bias.zero_()
        return
    moments = torch.zeros(dense.in_features, dense.in_features).double()
    right = torch.zeros(dense.in_features, dense.out_features).double()
    for (units, hidden), target in zip(units_of(block, states), targets, strict=True):
        moments += (units.T @ units).double()
        right += (units.T @ (target - hidden - dense.bias)).double()
    dense.weight.copy_(torch.linalg.lstsq(moments, right).solution.T)
