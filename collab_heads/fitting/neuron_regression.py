"""Least squares on neurons: which of them the others reconstruct, and the last projection for those that are left.

A feed-forward block adds W x + b to its model, with x the outputs of its neurons. It is the regression of W_O on heads
(`head_regression`), with heads of width 1.

Shapes: F neurons, D width of the model, K kept neurons.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from collab_heads.base.numerics import cholesky_
from collab_heads.calibration.input_moments import InputMoments
from collab_heads.fitting.head_regression import ROUNDING, HeadRegression, block_of, missing_square
from collab_heads.layers.layout import weight_of
from collab_heads.model.open_layers import OpenFeedForward

# Covariances between neurons are shrunk as if further tokens, this share of the number of neurons, had shown none.
# Measured on MiniLM with 256 and with 2,048 sentences: the best for few tokens, and no worse for many.
DOUBT = 0.3
BLOCK = 32  # removals between two updates of the matrices


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
        removing neuron j adds |w_j|^2 / P_jj to the mean square of the error. P and W change by a product of rank 1,
        which is written to a list; the matrices themselves are updated once in `BLOCK` removals, and become smaller.

        Returns:
            [F], float64: for every neuron the share of the block's output that is lost once it and all neurons removed
            before it are gone; 1 for the last one.
        """
        whole, neurons = self.whole, len(self.scatter)
        costs = torch.ones(neurons, dtype=torch.float64)
        left, lost = torch.arange(neurons), 0.0
        factor, weight = cholesky_(self.ridged(left)), self.weight.clone()
        inverse = torch.cholesky_inverse(factor, out=factor)
        while len(left) > 1 and whole:
            count = min(BLOCK, len(left) - 1)
            of_inverse, of_weight = inverse.new_zeros(count, len(left)), inverse.new_zeros(count, len(weight))
            diagonal, squares = inverse.diagonal().clone(), weight.square().sum(0)
            stays = torch.ones(len(left), dtype=torch.bool, device=inverse.device)
            for step in range(count):
                increase = torch.where(stays, squares / diagonal, torch.inf)
                place = int(increase.argmin())
                lost += max(0.0, float(increase[place] / whole))
                costs[left[place]] = min(lost, 1.0)
                stays[place] = False
                row = inverse[place] - of_inverse[:step, place] @ of_inverse[:step]  # of P as it is now
                column = weight[:, place] - of_inverse[:step, place] @ of_weight[:step]  # of W as it is now
                root = row[place].sqrt()
                of_inverse[step], of_weight[step] = row / root, column / root
                shares = row / row[place]
                products = column @ weight - (of_weight[:step] @ column) @ of_inverse[:step]  # of W^T W, as it is now
                squares = (squares - 2 * products * shares + column.square().sum() * shares.square()).clamp(min=0)
                diagonal = diagonal - row * shares
            inverse = block_of(inverse.addmm_(of_inverse.mT, of_inverse, alpha=-1), stays.nonzero()[:, 0])
            weight = weight.addmm_(of_weight.mT, of_inverse, alpha=-1)[:, stays]
            left = left[stays.cpu()]
        return costs


def refit_errors(
    regression: NeuronRegression, order: Tensor, counts: Iterable[int], seen: InputMoments
) -> dict[int, float]:
    """Measure the errors of last projections that are refitted for the first neurons of an order.

    One Cholesky factor serves all counts: its leading blocks are the factors of the leading blocks.

    Args:
        regression: the regression of the block, to which they are fitted.
        order: [k], indices of neurons.
        counts: numbers of neurons that stay, at most k.
        seen: the moments of all neurons on the examples to measure on.

    Returns:
        count -> the mean square of the change of the output, as a share of its variance.
    """
    weight, mean, order = regression.weight, seen.mean(), order.to(regression.scatter.device)
    products = weight @ seen.outer / seen.count
    square = float((products * weight).sum())
    variance = square - float((weight @ mean).square().sum())
    least = ROUNDING * torch.finfo(torch.float64).eps * square  # a smaller variance is that of a constant output
    second = block_of(seen.outer, order).div_(seen.count)
    del seen  # its matrix is as large as `second`
    factor = cholesky_(regression.ridged(order))
    half = torch.linalg.solve_triangular(factor, regression.right(order).mT, upper=False)
    errors = {}
    for count in counts:
        kept = order[:count]
        refit = torch.linalg.solve_triangular(factor[:count, :count].mT, half[:count], upper=True).mT
        bias = weight @ regression.mean - refit @ regression.mean[kept]
        shift = weight @ mean - refit @ mean[kept]
        lost = missing_square(square, products[:, kept], second[:count, :count], refit)
        lost += float(bias @ bias - 2 * bias @ shift)
        errors[count] = min(max(lost, 0.0) / variance, 1.0) if variance > least else 0.0
    return errors
