"""Least squares on what heads output: which heads the others can stand in for, and W_O for those that are left.

A site adds W_O z + b to the model, with z the concatenated outputs of its heads. Without some of the heads, the best W_O
for the others is a linear regression of W_O z on what they output. All of it follows from the moments of z.

Shapes: H heads, d_v width of a value head, D width of the model, K kept heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collab_heads.collaborative.calibrate import Moments
from collab_heads.numerics import float64

RIDGE = 1e-6  # share of the mean square of the heads' outputs that is added to every direction


@dataclass(frozen=True)
class HeadRegression:
    """The regression of what a site adds on what its heads output.

    Attributes:
        weight: [D, H * d_v], float64: W_O, with alphas if there are any.
        scatter: [H * d_v, H * d_v], float64: second moments of z, around its mean where W_O has a bias that can take
            up the difference.
        mean: [H * d_v], the mean of z; zeros where W_O has no bias.
        num_heads: H.
    """

    weight: Tensor
    scatter: Tensor
    mean: Tensor
    num_heads: int

    @classmethod
    def of(cls, weight: Tensor, moments: Moments, num_heads: int, *, has_bias: bool) -> "HeadRegression":
        """From W_O and the moments of what it receives."""
        scatter, mean = moments.second(), moments.mean()
        if has_bias:
            scatter = scatter - mean.outer(mean)
        else:
            mean = torch.zeros_like(mean)
        return cls(float64(weight), scatter, mean, num_heads)

    def ridged(self) -> Tensor:
        """The second moments with a ridge: [H * d_v, H * d_v]."""
        square = self.scatter.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)
        return self.scatter + RIDGE * square * torch.eye(len(self.scatter)).to(self.scatter)

    def columns(self, heads: Sequence[int]) -> Tensor:
        """The places of some heads in z."""
        places = torch.arange(len(self.scatter), device=self.scatter.device).unflatten(0, (self.num_heads, -1))
        return places[list(heads)].flatten()

    def refit(self, kept: Sequence[int]) -> tuple[Tensor, Tensor]:
        """W_O for the kept heads, and what its bias gains: [D, K * d_v], [D]."""
        columns, scatter = self.columns(kept), self.ridged()
        right = self.weight @ scatter[:, columns]  # (D, K * d_v)
        weight = torch.linalg.solve(scatter[columns][:, columns], right, left=False)
        return weight, self.weight @ self.mean - weight @ self.mean[columns]

    def error(self, kept: Sequence[int], weight: Tensor) -> float:
        """The mean square of what a site without some heads gets wrong, as a share of what it adds."""
        difference = self.weight.clone()
        difference[:, self.columns(kept)] -= weight
        return float(self.square(difference) / self.square(self.weight))

    def square(self, weight: Tensor) -> Tensor:
        """The mean square of W z."""
        return ((weight @ self.scatter) * weight).sum()

    def removal_errors(self) -> Tensor:
        """Remove one head after the other, always the one that the others stand in for best.

        Returns:
            [H]: for each head, the share of what the site adds that is lost when it goes, and all that went before it
            are gone; the last one costs everything that was left. Higher is more important.
        """
        total, width = self.square(self.weight), len(self.scatter) // self.num_heads
        inverse = torch.linalg.inv(self.ridged())
        weight, left, lost = self.weight.clone(), list(range(self.num_heads)), self.weight.new_zeros(())
        errors = torch.zeros(self.num_heads, dtype=torch.float64)
        while left:
            blocks = inverse.unflatten(0, (len(left), width)).unflatten(-1, (len(left), width))
            diagonal = blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0)  # (heads left, d_v, d_v)
            parts = weight.unflatten(-1, (len(left), width)).movedim(1, 0)  # (heads left, D, d_v)
            # what is lost beyond the regression on all that are left: tr(W_h P_hh^-1 W_h^T)
            costs = (torch.linalg.solve(diagonal, parts.mT) * parts.mT).sum((-2, -1))
            place = int(costs.argmin())
            lost = lost + costs[place].clamp(min=0)
            errors[left.pop(place)] = float((lost / total).clamp(max=1))
            if not left:
                break
            gone = torch.arange(len(inverse), device=inverse.device).unflatten(0, (len(left) + 1, width))
            stays = torch.cat([gone[:place], gone[place + 1 :]]).flatten()
            gone = gone[place]
            step = torch.linalg.solve(inverse[gone][:, gone], inverse[gone][:, stays])  # (d_v, rest)
            weight = weight[:, stays] - weight[:, gone] @ step
            inverse = inverse[stays][:, stays] - inverse[stays][:, gone] @ step
        return errors
