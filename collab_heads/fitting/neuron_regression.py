"""Least squares on neurons: which of them the others reconstruct, and the last projection for those that are left.

A feed-forward block adds W x + b to its model, with x the outputs of its neurons. It is the regression of W_O on heads
(`head_regression`), with heads of width 1.

Shapes: F neurons, D width of the model, K kept neurons.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from collab_heads.base.numerics import cholesky_, invert_lower_, positive_inverse_
from collab_heads.calibration.input_moments import InputMoments
from collab_heads.fitting.head_regression import ROUNDING, HeadRegression, block_of
from collab_heads.layers.layout import weight_of
from collab_heads.model.open_layers import OpenFeedForward

# Covariances between neurons are shrunk as if further tokens, this share of the number of neurons, had shown none.
# Measured on MiniLM with 256 and with 2,048 sentences: the best for few tokens, and no worse for many.
DOUBT = 0.3
BLOCK = 128  # removals between two updates of the matrices
LEAST = 16  # neurons likely to go next, of which rows are computed together


class NeuronRegression(HeadRegression):
    """The regression of the output of a feed-forward block on its neurons."""

    @classmethod
    def of_block(cls, block: OpenFeedForward, moments: InputMoments) -> "NeuronRegression":
        """Set up the regression of a block, from the moments of what its last projection reads."""
        weight, has_bias = weight_of(block.output).detach(), block.output.bias is not None
        return cls.of(weight, moments, block.num_neurons, has_bias=has_bias, doubt=DOUBT)

    def removal_costs(self) -> Tensor:
        """Remove one neuron after the other, each time the one that the others reconstruct best.

        With P the inverse of the second moments of those that are left, and W the last projection refitted for them,
        removing neuron j adds |w_j|^2 / P_jj to the mean square of the error. P and W change by a product of rank 1.
        The matrices themselves are updated once in `BLOCK` removals, and become smaller.

        Returns:
            [F], float64: for every neuron the share of the block's output that is lost once it and all neurons removed
            before it are gone; 1 for the last one.
        """
        whole, left, lost = self.whole, torch.arange(len(self.scatter)), 0.0
        costs, inverse = torch.ones(len(left), dtype=torch.float64), self.scatter.clone()
        inverse.diagonal().add_(self.ridge)
        inverse = positive_inverse_(inverse)
        weight = self.weight.mT.clone(memory_format=torch.contiguous_format)  # (F, D)
        while len(left) > 1 and whole:
            gone, increases, vectors = next_removals(inverse, weight, min(BLOCK, len(left) - 1))
            for place, increase in zip(gone, increases, strict=True):
                lost += max(0.0, increase / whole)
                costs[left[place]] = min(lost, 1.0)
            # W changes by vectors^T changes: each of its rows that goes is a sum of the changes until then
            changes = torch.linalg.solve_triangular(vectors[:, gone].mT, weight[gone], upper=False)
            stay = len(left) - len(gone)
            holes, last = [place for place in gone if place < stay], sorted({*range(stay, len(left))} - {*gone})
            for rows in (left, weight, inverse, vectors.mT):
                rows[holes] = rows[last]
            inverse[:, holes] = inverse[:, last]
            left, weight, inverse, vectors = left[:stay], weight[:stay], inverse[:stay, :stay], vectors[:, :stay]
            weight.addmm_(vectors.mT, changes, alpha=-1)
            inverse.addmm_(vectors.mT, vectors, alpha=-1)
        return costs


def next_removals(inverse: Tensor, weight: Tensor, count: int) -> tuple[list[int], list[float], Tensor]:
    """Find the next neurons to remove, and leave the matrices as they are.

    A removal takes v v^T from P, and v u^T + u v^T from the products W^T W. Both vectors are written to a list. Rows of
    the two matrices are needed only for the neurons that go, so they are computed for some that are likely to.

    Args:
        inverse: [k, k], P.
        weight: [k, D], W transposed.
        count: how many to remove, fewer than k.

    Returns:
        Their places, by how much each increases the mean square of the error, and the vectors v: [count, k].
    """
    diagonal, squares = inverse.diagonal().clone(), torch.linalg.vector_norm(weight, dim=1).square_()
    pending = inverse.new_empty(count, 2, len(weight))  # v and u of each removal
    vectors, products = pending.unbind(1)
    gone: list[int] = []
    increases: list[float] = []
    grams: dict[int, Tensor] = {}  # rows of W^T W before the first removal
    likely: dict[int, tuple[Tensor, Tensor]] = {}  # rows of P and of W^T W before removal `first`
    first = 0
    for step in range(count):
        expected = squares / diagonal
        place = int(expected.argmin())
        gone.append(place)
        increases.append(float(expected[place]))
        if place not in likely:
            places = expected.topk(min(max(count - step, LEAST), len(weight)), largest=False).indices
            if place not in places:  # of many that are equal
                places[-1] = place
            new = [other for other in places.tolist() if other not in grams]
            grams.update(zip(new, weight[new] @ weight.mT, strict=True))
            of_inverse, of_grams = inverse[places], torch.stack([grams[other] for other in places.tolist()])
            of_inverse.addmm_(vectors[:step, places].mT, vectors[:step], alpha=-1)
            of_grams.addmm_(vectors[:step, places].mT, products[:step], alpha=-1)
            of_grams.addmm_(products[:step, places].mT, vectors[:step], alpha=-1)
            likely, first = dict(zip(places.tolist(), zip(of_inverse, of_grams, strict=True), strict=True)), step
        row, gram = likely[place]
        since = pending[first:step]
        vv, vu, uv, _ = (since[:, :, place].mT @ since.flatten(1)).view(4, len(weight))
        row, gram = row - vv, gram - vu - uv
        root = max(float(row[place]), torch.finfo(row.dtype).tiny) ** 0.5
        vector = torch.mul(row, 1 / root, out=vectors[step])
        product = torch.sub(gram.mul_(1 / root), vector, alpha=float(gram[place]) / 2 / root, out=products[step])
        diagonal.addcmul_(vector, vector, value=-1)
        squares.addcmul_(vector, product, value=-2).clamp_(min=0)
        squares[place].fill_(torch.inf)
        diagonal[place].fill_(1)
    return gone, increases, vectors


def refit_errors(
    regression: NeuronRegression, order: Tensor, counts: Iterable[int], seen: InputMoments
) -> dict[int, float]:
    """Measure the errors of last projections that are refitted for the first neurons of an order.

    One Cholesky factor L serves all counts: its leading blocks are the factors of the leading blocks. With R the right
    sides of the normal equations, one row per neuron, W'^T = L^-T L^-1 R. So each block of rows of L^-1 adds a product
    to W', and what it adds to the mean square of W' u is a product of blocks, too.

    Args:
        regression: the regression of the block, to which they are fitted.
        order: [k], indices of neurons.
        counts: numbers of neurons that stay, at most k.
        seen: the moments of all neurons on the examples to measure on.

    Returns:
        count -> the mean square of the change of the output, as a share of its variance.
    """
    counts = list(counts)
    weight, mean = regression.weight, seen.mean()
    order = order[: max(counts, default=0)].to(regression.scatter.device)
    products = (weight @ seen.outer).div_(seen.count)
    square = float((products * weight).sum())
    variance = square - float((weight @ mean).square().sum())
    least = ROUNDING * torch.finfo(torch.float64).eps * square  # a smaller variance is that of a constant output
    right, products = regression.right(order).mT, products[:, order].mT.contiguous()  # (k, D)
    second = block_of(seen.outer, order).div_(seen.count)
    del seen  # its matrix is as large as `second`
    inverse = invert_lower_(cholesky_(regression.ridged(order)))
    refit, refitted, start, errors = torch.zeros_like(products), 0.0, 0, {}
    for count in sorted(set(counts)):
        kept, rows = order[:count], inverse[start:count, :count]
        half = rows @ right[:count]  # (new, D), of L^-1 R
        now = refit[:count].addmm_(rows.mT, half)
        on_seen = rows @ second[:count, :count]
        refitted += float((half * (2 * (on_seen @ now) - (on_seen @ rows.mT) @ half)).sum())
        both = float(now.flatten() @ products[:count].flatten())
        bias = weight @ regression.mean - regression.mean[kept] @ now
        shift = weight @ mean - mean[kept] @ now
        lost = max(square - 2 * both + refitted, 0.0) + float(bias @ bias - 2 * bias @ shift)
        errors[count] = min(max(lost, 0.0) / variance, 1.0) if variance > least else 0.0
        start = count
    return {count: errors[count] for count in counts}
