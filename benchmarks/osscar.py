"""OSSCAR: remove heads and neurons, and fit the last projections, by a search on a problem of least squares.

The layers are pruned from the first to the last, each on what the pruned layers before it put out. For the inputs X of
a last projection and its weight W, the units to keep are those from which X W' can be computed best. Units are
removed few at a time, those that cost least, and the rest is fitted again after each step; then as many are exchanged
as long as the error falls, at most 30 times. Numbers are those of the authors' program: a ridge of 1e-2 of the mean of
the Gram matrix's diagonal, and ten neurons at a time. Both problems of a layer have their inputs from the layer before
it is pruned. Every layer keeps the same share of neurons, and the same of heads.

As by the program's default (without its option `fullseq`), the outputs to fit are those of the original weights on the
present inputs.

It differs from the program in three places: heads that share a key head go together, one group at a time (the program
removes two heads and exchanges five); the share of these groups is the nearest to the budget, and neurons take what is
left (the program removes the same share of both); the search by exchange, an option of the program, is on.

Source: Meng, Ibrahim, Behdin, Hazimeh, Ponomareva, Mazumder 2024, "OSSCAR: One-Shot Structured Pruning in Vision and
Language Models with Combinatorial Optimization", arXiv:2403.12983; github.com/mazumder-lab/OSSCAR.
"""

import math

import torch
from decoder_peers import ROUNDING, Batches, Units, layer_parameters, places, units_of
from slicegpt import first_inputs
from torch import Tensor
from transformers import PreTrainedModel

RIDGE, AT_ONCE, EXCHANGES = 1e-2, 10, 30
LESS = 1e-9  # the share by which an exchange has to improve


@torch.no_grad()
def osscar(model: PreTrainedModel, batches: Batches, budget: float) -> PreTrainedModel:
    """Remove heads and neurons in place and return the model."""
    counts, states = even_counts(units_of(model), budget * layer_parameters(model)), first_inputs(model, batches)
    for layer in model.model.layers:
        parts = [Units(layer, kind) for kind in (True, False)]
        problems = [Problem(units) for units in parts]
        handles = [
            units.last.register_forward_hook(lambda _, inputs, __, problem=problem: problem.add(inputs[0]))
            for units, problem in zip(parts, problems, strict=True)
        ]
        for hidden, rest in states:
            layer(hidden, **rest)
        for handle in handles:
            handle.remove()
        for units, problem in zip(parts, problems, strict=True):
            kept = problem.searched(counts[units.is_attention], 1 if units.is_attention else AT_ONCE)
            units.keep(kept, problem.fitted(units.columns(kept)).T)
        states = [(layer(hidden, **rest), rest) for hidden, rest in states]
    return model


def even_counts(units: list[Units], room: float) -> dict[bool, int]:
    """Return how many groups and how many neurons each layer keeps: True -> groups, False -> neurons."""
    (attention, feed_forward), layers = units[:2], len(units) // 2
    whole = sum(each.count * each.cost for each in units)
    groups = max(1, round(room / whole * attention.count))
    left = room / layers - groups * attention.cost
    return {True: groups, False: min(feed_forward.count, math.floor(left / feed_forward.cost + ROUNDING))}


class Problem:
    """Which units of a last projection to keep, and its weight for them, so that X W' changes least.

    Attributes:
        gram: X'X and the ridge: [columns, columns], float64.
        right: what belongs to it on the right-hand side: [columns, D].
    """

    def __init__(self, units: Units):
        self.width, self.count, self.weight = units.width, units.count, units.last.weight.double().T
        self.products = torch.zeros(len(self.weight), len(self.weight), dtype=torch.float64)

    def add(self, inputs: Tensor) -> None:
        tokens = inputs.flatten(0, -2).double()
        self.products += tokens.T @ tokens

    @property
    def gram(self) -> Tensor:
        return self.products + RIDGE * self.products.diagonal().mean() * torch.eye(len(self.products)).double()

    def fitted(self, columns: Tensor) -> Tensor:
        """Return the weight for some columns: [columns, D]."""
        gram = self.gram
        return torch.linalg.solve(gram[columns][:, columns], gram[columns] @ self.weight)

    def searched(self, count: int, at_once: int) -> Tensor:
        """Return the units to keep, ascending."""
        gram = self.gram
        right = gram @ self.weight
        kept = torch.ones(self.count, dtype=torch.bool)
        inverse, weight = torch.linalg.inv(gram), self.weight.clone()
        while kept.sum() > count:
            self.remove(min(at_once, int(kept.sum()) - count), kept, inverse, weight)
        best = (right * weight).sum()  # the larger, the smaller the error
        for _ in range(EXCHANGES):
            swapped, swaps = kept.clone(), min(at_once, count, self.count - count)
            if not swaps:
                break
            self.remove(swaps, swapped, inverse, weight)
            gains = self.gains(swapped, gram, inverse, right - gram @ weight)
            swapped[gains.topk(swaps).indices] = True
            columns = places(swapped.nonzero().flatten(), self.width)
            inverse = torch.zeros_like(gram)
            inverse[columns[:, None], columns] = torch.linalg.inv(gram[columns][:, columns])
            weight = inverse @ right
            found = (right * weight).sum()
            if found <= best * (1 + LESS):
                break
            best, kept = found, swapped
        return kept.nonzero().flatten()

    def blocks(self, matrix: Tensor, units: Tensor) -> Tensor:
        """Return the diagonal blocks of some units: [columns, columns] -> [units, width, width]."""
        return matrix.view(self.count, self.width, self.count, self.width)[units, :, units]

    def remove(self, number: int, kept: Tensor, inverse: Tensor, weight: Tensor) -> None:
        """Remove the units that cost least, in place.

        Args:
            number: of units.
            kept: [units], which are there.
            inverse: [columns, columns], of the Gram matrix of those; 0 elsewhere.
            weight: [columns, D], the fitted one; 0 elsewhere.
        """
        units = kept.nonzero().flatten()
        rows = weight.view(self.count, self.width, -1)[units]
        costs = (rows * torch.linalg.solve(self.blocks(inverse, units), rows)).sum((1, 2))
        gone = units[costs.topk(number, largest=False).indices]
        columns = places(gone, self.width)
        share = inverse[:, columns] @ torch.linalg.inv(inverse[columns][:, columns])
        weight -= share @ weight[columns]
        inverse -= share @ inverse[columns]
        weight[columns], inverse[columns], inverse[:, columns] = 0.0, 0.0, 0.0
        kept[gone] = False

    def gains(self, kept: Tensor, gram: Tensor, inverse: Tensor, rest: Tensor) -> Tensor:
        """Return by how much the error falls if a unit comes back: [units], -inf for those that are there.

        Args:
            kept: [units], which are there.
            gram: [columns, columns].
            inverse: of the Gram matrix of those; 0 elsewhere.
            rest: [columns, D], the right-hand side less what the present weight explains.
        """
        units = (~kept).nonzero().flatten()
        columns = places(units, self.width)
        across = gram[:, columns]
        own = gram[columns][:, columns] - across.T @ inverse @ across
        own = own.view(len(units), self.width, len(units), self.width)
        rows, at = rest.view(self.count, self.width, -1)[units], torch.arange(len(units))
        found = torch.full((self.count,), -torch.inf, dtype=torch.float64)
        found[units] = (rows * torch.linalg.solve(own[at, :, at], rows)).sum((1, 2))
        return found
