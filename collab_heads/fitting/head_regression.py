"""Least squares on the outputs of heads: which heads the others can reconstruct, and W_O for the heads that are left.

A site adds W_O z + b to its model, with z the concatenated outputs of its heads. Without some of the heads, the best
W_O for the others is a linear regression of W_O z on their outputs. It follows from the moments of z on some batches;
no labels are needed.

Shapes: H heads, d_v width of a value head, n = H * d_v, D width of the model, K kept heads.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.base.numerics import float64, solve_positive, with_ridge
from collab_heads.calibration.input_moments import InputMoments, listening_to_outputs
from collab_heads.fitting.values import DOUBT, doubted_
from collab_heads.layers.gates import HeadGates
from collab_heads.layers.layout import weight_of
from collab_heads.layers.output import HeadOutputProjection
from collab_heads.model.apply_state import OutputWeights
from collab_heads.model.open_layers import OpenSite
from collab_heads.running.batches import run_batches
from collab_heads.running.portions import portions

Regression = TypeVar("Regression", bound="HeadRegression")
ROUNDING = 1000  # in eps times the squared mean; constants gave eigenvalues down to -125 of these
RIDGE = 1e-6  # ridge on every direction, as a share of the mean square of the outputs of heads
ROWS = 64  # copied at once: indices of all entries would need twice the memory of the matrix


@dataclass(frozen=True)
class Refit(OutputWeights):
    """The refitted W_O for the heads that are left, in float64.

    Attributes:
        share_lost: the mean squared error, as a share of the mean square of the site's output.
    """

    share_lost: float


@dataclass(frozen=True)
class HeadRegression:
    """The regression of a site's output on the outputs of its heads.

    Attributes:
        weight: [D, n], float64: W_O as it applies to `z`.
        scatter: [n, n], float64: second moments of z, around its mean if W_O has a bias that can compensate for the
            mean.
        mean: [n], the mean of z; zeros where W_O has no bias.
        num_heads: H.
    """

    weight: Tensor
    scatter: Tensor
    mean: Tensor
    num_heads: int

    @classmethod
    def of(
        cls: type[Regression],
        weight: Tensor,
        moments: InputMoments,
        num_heads: int,
        *,
        gates: Tensor | None = None,
        has_bias: bool = True,
        doubt: float | None = None,
    ) -> Regression:
        """Set up the regression from W_O and the moments of the heads.

        Args:
            weight: [D, n], W_O with alphas if there are any, and without the gates that stay.
            moments: of the concatenated heads, before gates and alphas.
            num_heads: H.
            gates: [H], the values of gates that stay and multiply the inputs of W_O; None for 1.
            has_bias: whether W_O has a bias.
            doubt: how far covariances between heads are shrunk, see `doubted_`; None for `DOUBT`.
        """
        second, mean = moments.second(), moments.mean()
        if gates is not None:
            factors = gates.to(mean).repeat_interleave(len(mean) // num_heads)
            second, mean = second.mul_(factors.outer(factors)), mean * factors
        if not has_bias:
            mean = torch.zeros_like(mean)
        scatter = second.addr_(mean, mean, alpha=-1)
        doubted_(scatter, moments.count, num_heads, DOUBT if doubt is None else doubt)
        return cls(float64(weight), scatter, mean, num_heads)

    @functools.cached_property
    def ridge(self) -> Tensor:
        """The ridge on the diagonal of the second moments, with which they are positive definite: [n].

        Where heads put out constants, what is left around the mean is rounding, which may be negative. Products of
        float32 round by the size of a column, which may be far above the mean.
        """
        numbers, squares = torch.finfo(torch.float64), self.scatter.diagonal()
        least = RIDGE * float(squares.mean().clamp(min=numbers.tiny**0.5))
        return max(least, ROUNDING * numbers.eps * float(self.mean @ self.mean)) + RIDGE * squares.clamp(min=0)

    def ridged(self, columns: Tensor, times: float = 1) -> Tensor:
        """Return the second moments of some columns of z with the ridge, or with a multiple of it: [k, k]."""
        ridged = block_of(self.scatter, columns)
        ridged.diagonal().add_(self.ridge[columns], alpha=times)
        return ridged

    def right(self, columns: Tensor, times: float = 1) -> Tensor:
        """Return the right side of the normal equations for some columns of z, ridge included: [D, k]."""
        return self.products[:, columns].addcmul_(self.weight[:, columns], self.ridge[columns], value=times)

    @functools.cached_property
    def products(self) -> Tensor:
        """The weight times the second moments: [D, n]."""
        return self.weight @ self.scatter

    @functools.cached_property
    def whole(self) -> float:
        """The mean square of the site's output."""
        return max(float((self.products * self.weight).sum()), 0.0)

    def columns(self, heads: Sequence[int]) -> Tensor:
        """Return the indices of some heads in z."""
        places = torch.arange(len(self.scatter), device=self.scatter.device).unflatten(0, (self.num_heads, -1))
        return places[list(heads)].flatten()

    def refit(self, kept: Sequence[int]) -> Refit:
        """Return W_O for the kept heads, given by their indices."""
        columns, output = self.columns(kept), self.output(kept)
        lost = missing_square(self.whole, self.products[:, columns], block_of(self.scatter, columns), output.weight)
        return Refit(output.weight, output.bias, lost / self.whole if self.whole else 0.0)

    def output(self, kept: Sequence[int]) -> OutputWeights:
        """Return W_O for the kept heads, given by their indices, and do not compute its error."""
        columns = self.columns(kept)
        weight = self.solved(columns)
        return OutputWeights(weight, self.weight @ self.mean - weight @ self.mean[columns])

    def solved(self, columns: Tensor) -> Tensor:
        """Solve the normal equations for some columns of z: [D, k]."""
        return with_ridge(lambda times: solve_positive(self.ridged(columns, times), self.right(columns, times).mT).mT)

    def removal_costs(self) -> Tensor:
        """Remove one head after the other, each time the one that the others reconstruct best.

        Returns:
            [H], float64: for every head the share of the site's output that is lost once it and all heads removed
            before it are gone; 1 for the last one. All are 0 where the output is.
        """
        whole, width = self.whole, len(self.scatter) // self.num_heads
        if not whole:
            return torch.zeros(self.num_heads, dtype=torch.float64)
        left, lost = list(range(self.num_heads)), 0.0
        inverse, weight = torch.linalg.inv(self.ridged(self.columns(left))), self.weight.clone()
        costs = torch.ones(self.num_heads, dtype=torch.float64)
        while len(left) > 1:
            blocks = inverse.unflatten(0, (len(left), width)).unflatten(-1, (len(left), width))
            of_heads = blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0)  # (heads left, d_v, d_v)
            parts = weight.unflatten(-1, (len(left), width)).movedim(1, 0).mT  # (heads left, d_v, D)
            # beyond what is lost already: tr(W_h P_hh^-1 W_h^T), P the inverse of the moments of those that are left
            increase = (torch.linalg.solve(of_heads, parts) * parts).sum((-2, -1))
            place = int(increase.argmin())
            lost += max(0.0, float(increase[place] / whole))
            costs[left.pop(place)] = min(lost, 1.0)
            places = torch.arange(len(inverse), device=inverse.device).unflatten(0, (len(left) + 1, width))
            gone, stay = places[place], torch.cat([places[:place], places[place + 1 :]]).flatten()
            step = torch.linalg.solve(inverse[gone][:, gone], inverse[gone][:, stay])  # (d_v, those that stay)
            weight = weight[:, stay] - weight[:, gone] @ step
            inverse = inverse[stay][:, stay] - inverse[stay][:, gone] @ step
        return costs


def most_costly(costs: Tensor, count: int) -> list[int]:
    """Return the indices, ascending, of the `count` heads that stay; for costs see `HeadRegression.removal_costs`."""
    return sorted(by_cost(costs)[:count].tolist())


def by_cost(costs: Tensor) -> Tensor:
    """Return the indices of heads or neurons, those that stay longest first."""
    return costs.argsort(descending=True, stable=True)


def block_of(matrix: Tensor, places: Tensor) -> Tensor:
    """Return some rows of a matrix and the same columns, without a copy of all columns: [k, k]."""
    block = matrix.new_empty(len(places), len(places))
    for rows, own in zip(block.split(ROWS), places.split(ROWS), strict=True):
        torch.index_select(matrix[own], 1, places, out=rows)
    return block


def missing_square(whole: float, products: Tensor, second: Tensor, refit: Tensor) -> float:
    """Return the mean square of what is missing, W z - W' u with u what is left of z; never negative by rounding.

    Args:
        whole: the mean square of W z.
        products: [D, k], the means of W z u^T.
        second: [k, k], the second moments of u.
        refit: [D, k], W'.
    """
    both, left = (products * refit).sum(), ((refit @ second) * refit).sum()
    return max(whole - 2 * float(both) + float(left), 0.0)


@torch.no_grad()
def regressions(
    model: PreTrainedModel,
    sites: Sequence[OpenSite],
    batches: Iterable[Mapping],
    *,
    folds_gates: bool = False,
    what: str = "refitting outputs",
) -> dict[str, HeadRegression]:
    """Run batches through a model, which is not changed, and set up the regression of every site.

    Args:
        model: in any mode; it runs in evaluation mode, without gradients.
        sites: sites that have heads.
        batches: input dicts as the model takes them.
        folds_gates: whether gates will be multiplied into W_O, so that its inputs are the heads themselves.
        what: what it is for, beside the progress bar.

    Returns:
        path -> regression.

    Raises:
        CalibrationError: if there are no batches, the model cannot take one, or a site saw no tokens.
        NonFiniteError: if the output of a head contains NaN or inf; the site is named.
    """
    masks: dict[str, Tensor | None] = {}
    cut = functools.partial(portions, is_encoder_decoder=model.config.is_encoder_decoder)
    fixed = [gates for gates in map(fixed_gates, sites) if gates is not None and folds_gates]
    with listening_to_outputs(sites, masks) as listeners, opened(fixed):
        run_batches(model, batches, masks, what, cut=cut)
    found: dict[str, HeadRegression] = {}
    for site, listener in zip(sites, listeners, strict=True):
        weight, gates = regressed_weight(site, folds_gates=folds_gates)
        has_bias = getattr(site.output, "bias", None) is not None
        moments = listener.moments()
        found[site.path] = HeadRegression.of(weight, moments, site.num_heads, gates=gates, has_bias=has_bias)
    return found


def fixed_gates(site: OpenSite) -> HeadGates | None:
    """Return the gates of a site if they are fixed, else None."""
    gates = site.output.gates if isinstance(site.output, HeadOutputProjection) else None
    return None if gates is None or gates.state.is_learned else gates


@contextmanager
def opened(fixed: Sequence[HeadGates]) -> Iterator[None]:
    """Open fixed gates while the context is open; their values are restored."""
    before = [gates.alive.clone() for gates in fixed]
    try:
        for gates in fixed:
            gates.alive.fill_(1)
        yield
    finally:
        for gates, alive in zip(fixed, before, strict=True):
            gates.alive.copy_(alive)


def regressed_weight(site: OpenSite, *, folds_gates: bool) -> tuple[Tensor, Tensor | None]:
    """Return W_O with alphas [D, n], and the values of the gates before it that stay [H], if any.

    Gates that are folded are part of W_O, except fixed ones, which count as open: the model was not trained with them.
    """
    output = site.output
    if not isinstance(output, HeadOutputProjection) or output.gates is None:
        return site.output_weight(), None
    if folds_gates and fixed_gates(site) is None:
        return site.output_weight(), None
    plain = weight_of(output).detach()
    weight = plain if output.mixing is None else output.mixing(plain.cpu()).to(plain)
    return weight, None if folds_gates else output.gates.values()
