"""Narrow the values of a site: the best A[h] and B[h] with B[h] A[h] z_h ~ W_O[h] z_h for what its heads put out.

With the covariance C of all concatenated heads z the error of the site's output is tr(E C E^T), E[h] = W_O[h] - B[h]
A[h]. For one head alone an SVD of W_O[h] L, L L^T = C[h, h], is optimal. Heads are correlated, so one can make up for
what another lost: each in turn is fitted to what the others leave over (a reduced-rank regression, again one SVD),
which never makes the error larger. All of it comes from C; no token is looked at twice.

Shapes: as in `layers.values`; n = H * d_v.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from collab_heads.collaborative.decompose import input_root
from collab_heads.collaborative.input_moments import InputMoments
from collab_heads.layers.values import ValueWeights
from collab_heads.numerics import float64

RIDGE = 1e-4  # share of a head's mean variance that is added to every direction, so that none is lost for good
SWEEPS = 8  # over the heads of a site


@dataclass(frozen=True)
class NarrowValues:
    """The values of a site in fewer dimensions.

    Attributes:
        weights: of the narrower values and of what reads them.
        variance_lost: predicted share of the variance of the site's output that is lost: on the calibration inputs, or
            without calibration of inputs that are white.
    """

    weights: ValueWeights
    variance_lost: float


@dataclass(frozen=True)
class HeadMoments:
    """What heads put out, as far as it matters for narrowing them.

    Attributes:
        mean: [n]; zeros where it may not be taken off.
        covariance: [n, n], around that mean; zero between heads where each is to be narrowed alone.
    """

    mean: Tensor
    covariance: Tensor


def head_moments(weights: ValueWeights, num_heads: int, seen: InputMoments | None, *, has_gates: bool) -> HeadMoments:
    """The moments by which errors are weighted.

    A mean can be taken off where a bias can take it over: W_O's, of a site without gates. Gates close heads one by one,
    with whatever another head left to them, so there each head stands alone.

    Args:
        weights: of the site.
        num_heads: H.
        seen: of the concatenated heads, by calibration. Without it inputs are taken to be white and heads to have
            nothing to do with each other: the products W_O[h] W_V[h] are then preserved best.
        has_gates: whether the site has gates.
    """
    takes_mean = weights.output_bias is not None and not has_gates
    if seen is None:
        value, bias = float64(weights.value), weights.value_bias
        mean = value.new_zeros(len(value)) if bias is None else float64(bias)
        second = value @ value.mT + mean.outer(mean)
    else:
        mean, second = seen.mean(), seen.second()
    mean = mean if takes_mean else torch.zeros_like(mean)
    covariance = second - mean.outer(mean)
    if seen is None or has_gates:
        own = torch.eye(num_heads, device=mean.device).repeat_interleave(len(mean) // num_heads, 0)
        covariance = covariance * (own @ own.mT)
    return HeadMoments(mean, covariance)


@torch.no_grad()
def narrow_values(weights: ValueWeights, num_heads: int, width: int, moments: HeadMoments) -> NarrowValues:
    """Narrow every value head of a site to `width` dimensions.

    Args:
        weights: of the site.
        num_heads: H.
        width: r, at most d_v; at d_v only the basis of the heads changes.
        moments: of what its heads put out.
    """
    output, covariance = float64(weights.output), moments.covariance
    heads = output.unflatten(1, (num_heads, -1)).transpose(0, 1)  # (H, D, d_v)
    blocks = covariance.unflatten(0, (num_heads, -1)).unflatten(2, (num_heads, -1)).transpose(1, 2)  # (H, H, d_v, d_v)
    roots = torch.stack([input_root(blocks[head, head], RIDGE) for head in range(num_heads)])
    error = torch.zeros_like(heads)
    kept: list[tuple[Tensor, Tensor]] = []  # B [D, r] and A [r, d_v] of every head
    for _ in range(SWEEPS):
        kept = []
        for head, root in enumerate(roots):
            left_over = torch.einsum("jdv,jvw->dw", error, blocks[:, head]) - error[head] @ blocks[head, head]
            wanted = heads[head] + torch.cholesky_solve(left_over.mT, root).mT
            columns = leading_directions(wanted @ root, width)
            rows = columns.mT @ wanted
            error[head] = heads[head] - columns @ rows
            kept.append((columns, rows))
    lost = error.transpose(0, 1).flatten(1)  # (D, n)
    value = float64(weights.value).unflatten(0, (num_heads, -1))
    bias = None if weights.value_bias is None else float64(weights.value_bias).unflatten(0, (num_heads, -1))
    narrow = ValueWeights(
        torch.cat([rows @ each for (_, rows), each in zip(kept, value, strict=True)]),
        None if bias is None else torch.cat([rows @ each for (_, rows), each in zip(kept, bias, strict=True)]),
        torch.cat([columns for columns, _ in kept], dim=1),
        None if weights.output_bias is None else float64(weights.output_bias) + lost @ moments.mean,
    )
    total = variance(output, covariance)
    return NarrowValues(narrow, variance(lost, covariance) / total if total else 0.0)


def leading_directions(matrix: Tensor, count: int) -> Tensor:
    """The left singular vectors of the largest singular values: [D, d] -> [D, count]."""
    basis, small = torch.linalg.qr(matrix)
    return basis @ torch.linalg.svd(small)[0][:, :count]


def variance(weight: Tensor, covariance: Tensor) -> float:
    """tr(W C W^T)."""
    return float(((weight @ covariance) * weight).sum())
