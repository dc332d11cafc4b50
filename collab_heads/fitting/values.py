"""Narrow the values of a site: find A[h] and B[h] with B[h] A[h] z_h ~ W_O[h] z_h for the outputs z_h of its heads.

With the covariance C of all concatenated heads z, the error of the site's output is tr(E C E^T), where E[h] = W_O[h] -
B[h] A[h]. For a single head, an SVD of W_O[h] L, L L^T = C[h, h], is optimal. Heads are correlated, so one head can
compensate for what another lost. Each head in turn is therefore fitted to what the others leave over (a reduced-rank
regression, again one SVD), which never increases the error. Heads that share a value head share A, for which there is
no closed form. For a given A the best B of all heads is a regression, so the error is a function of A alone, which
`common_rows` minimises by L-BFGS, from the rows that are best if all heads weigh alike. Everything is computed from C;
no token is read twice.

Shapes: as in `layers.values`; n = H * d_v, H_k value heads; in `common_rows` m heads
share a value head of width d_v, r is the narrower width, D that of the model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collab_heads.base.numerics import float64
from collab_heads.calibration.input_moments import InputMoments
from collab_heads.fitting.decompose import input_root
from collab_heads.layers.values import ValueWeights
from collab_heads.sites.site import per_head

# Share of the covariance that white inputs would give a head, scaled to the variance that the head has. It ranks the
# directions that the calibration did not show, and keeps heads from compensating for others by chance.
WHITE = 1e-4
# Share of the mean square of a head's output that is added to every direction. It exceeds the rounding errors of a
# covariance, which are all that a covariance holds if the output of the head is constant.
RIDGE = 1e-10
# Covariances between heads are shrunk as if further tokens, as many as there are dimensions, had shown none: on few
# tokens such covariances are largely chance, and fitting chance costs more than it gains.
DOUBT = 1.0
SWEEPS = 8  # over the heads of a site
GAIN = 3e-3  # share of the loss: where heads share value heads, sweeps end with one that gains less
TINY = 1e-300  # instead of dividing by zero


@dataclass(frozen=True)
class NarrowValues:
    """The narrower values of a site.

    Attributes:
        weights: the weights of the narrower values and of the output projection that reads them.
        variance_lost: predicted share of the variance of the site's output that is lost.
    """

    weights: ValueWeights
    variance_lost: float


@dataclass(frozen=True)
class HeadMoments:
    """The moments of the heads' outputs by which the error of narrower values is weighted.

    Attributes:
        mean: [n]; zeros if it may not be subtracted.
        covariance: [n, n], around that mean. Between heads it is shrunk, see `DOUBT`, and zero if each head is to be
            narrowed alone.
        roots: [H, d_v, d_v], lower-triangular roots of the heads' own covariances, regularised.
    """

    mean: Tensor
    covariance: Tensor
    roots: Tensor

    def regularised(self) -> Tensor:
        """Return the covariance with the regularised covariances of the heads: [n, n], positive definite."""
        covariance = self.covariance.clone()
        diagonal_blocks(covariance, len(self.roots)).copy_(self.roots @ self.roots.mT)
        return covariance


def head_moments(
    weights: ValueWeights, groups: Sequence[int], seen: InputMoments | None, *, has_gates: bool
) -> HeadMoments:
    """Return the moments by which errors are weighted.

    The mean is subtracted if a bias can absorb it: that of W_O, in a site without gates. Gates can close any head,
    together with what it does to compensate for others, so with gates each head is narrowed alone.

    Args:
        weights: the weights of the site.
        groups: [H], the value head of every head.
        seen: the moments of the concatenated heads from calibration. Without them, inputs are assumed to be white and
            heads to be uncorrelated, which best preserves the products W_O[h] W_V[h].
        has_gates: whether the site has gates.
    """
    takes_mean, num_heads = weights.output_bias is not None and not has_gates, len(groups)
    value, bias = for_each_head(float64(weights.value), groups), weights.value_bias
    white = value @ value.mT
    if seen is None:
        mean = value.new_zeros(len(value)) if bias is None else for_each_head(float64(bias), groups)
        second = white + mean.outer(mean)
    else:
        mean, second = seen.mean(), seen.second()
    mean = mean if takes_mean else torch.zeros_like(mean)
    covariance = second - mean.outer(mean)
    doubted_(covariance, 0 if seen is None or has_gates else seen.count, num_heads, DOUBT)
    roots = []
    for weight, shown, size, by_weights in zip(
        per_head(float64(weights.output).mT, num_heads),
        diagonal_blocks(covariance, num_heads),
        diagonal_blocks(second, num_heads),
        diagonal_blocks(white, num_heads),
        strict=True,
    ):
        share = WHITE * variance(weight.mT, shown) / max(variance(weight.mT, by_weights), TINY)
        roots.append(input_root(shown + share * by_weights, 0.0, RIDGE * size.diagonal().mean()))
    return HeadMoments(mean, covariance, torch.stack(roots))


def for_each_head(rows: Tensor, groups: Sequence[int]) -> Tensor:
    """Repeat the rows of each value head for all heads that share it: [H_k * d_v, ...] -> [n, ...]."""
    return per_head(rows, max(groups) + 1)[list(groups)].flatten(0, 1)


def doubted_(covariance: Tensor, num_tokens: int, num_heads: int, doubt: float) -> None:
    """Shrink the entries of a covariance [n, n] between heads, in place; the entries within each head stay.

    Args:
        covariance: the covariance of the concatenated heads.
        num_tokens: the number of tokens that it comes from; 0 sets the entries between heads to zero.
        num_heads: H.
        doubt: the shrinkage: as if doubt * n further tokens had shown no covariance between heads.
    """
    trusted = num_tokens / (num_tokens + doubt * len(covariance)) if num_tokens else 0.0
    blocks = diagonal_blocks(covariance, num_heads)
    stays = blocks.clone()
    covariance *= trusted
    blocks.copy_(stays)


def diagonal_blocks(matrix: Tensor, num_heads: int) -> Tensor:
    """Return the diagonal block of each head: [n, n] -> [H, d_v, d_v]."""
    blocks = matrix.unflatten(0, (num_heads, -1)).unflatten(2, (num_heads, -1))  # (H, d_v, H, d_v)
    return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)


@dataclass(frozen=True)
class NarrowHeads:
    """The factors of B[h] A[h] for every head of a site.

    Attributes:
        columns: B, H matrices [D, r].
        rows: A, H_k matrices [r, d_v].
        lost: [D, n], W_O minus the products B[h] A[h].
    """

    columns: Sequence[Tensor]
    rows: Sequence[Tensor]
    lost: Tensor


@torch.no_grad()
def narrow_heads(weights: ValueWeights, groups: Sequence[int], width: int, moments: HeadMoments) -> NarrowHeads:
    """Find the best B[h] A[h] of rank `width` for every head; see `narrow_values`."""
    heads = head_columns(weights, groups)
    find = narrow_each if len(groups) == max(groups) + 1 else narrow_groups
    columns, rows = find(heads, groups, width, moments)
    lost = [head - column @ rows[key] for head, column, key in zip(heads, columns, groups, strict=True)]
    return NarrowHeads(columns, rows, torch.cat(lost, dim=1))


def head_columns(weights: ValueWeights, groups: Sequence[int]) -> Tensor:
    """Return the columns of W_O of each head: [H, D, d_v]."""
    return float64(weights.output).unflatten(1, (len(groups), -1)).transpose(0, 1)


def narrow_each(
    heads: Tensor, groups: Sequence[int], width: int, moments: HeadMoments
) -> tuple[list[Tensor], list[Tensor]]:
    """Fit B and A of heads [H, D, d_v] with a value head each, one head in turn to what the others leave over."""
    between = moments.covariance.unflatten(0, (len(heads), -1)).unflatten(2, (len(heads), -1))  # (H, d_v, H, d_v)
    error = torch.zeros_like(heads)
    columns, rows = [heads[0]] * len(heads), [heads[0]] * len(heads)
    for _ in range(SWEEPS):
        for head, root in enumerate(moments.roots):
            left_over = torch.einsum("jdv,jvw->dw", error, between[:, :, head]) - error[head] @ between[head, :, head]
            wanted = heads[head] + torch.cholesky_solve(left_over.mT, root).mT
            columns[head] = leading_directions(wanted @ root, width)
            rows[head] = columns[head].mT @ wanted
            error[head] = heads[head] - columns[head] @ rows[head]
    return columns, rows


def narrow_groups(
    heads: Tensor, groups: Sequence[int], width: int, moments: HeadMoments
) -> tuple[list[Tensor], list[Tensor]]:
    """Fit B and A of heads [H, D, d_v] that share value heads, one A after the other, until a sweep gains little."""
    weight = heads.transpose(0, 1).flatten(1)  # (D, n)
    covariance = moments.regularised()
    members = [[head for head, key in enumerate(groups) if key == key_head] for key_head in range(max(groups) + 1)]
    rows = [alike_rows(heads[own], moments.roots[own], width) for own in members]
    project = torch.block_diag(*(rows[key] for key in groups))  # (H * r, n)
    wanted, seen = weight @ covariance, project @ covariance
    columns = best_columns(wanted, seen, project)
    places = torch.arange(weight.shape[1], device=weight.device).unflatten(0, (len(groups), -1))
    narrow = torch.arange(len(seen), device=weight.device).unflatten(0, (len(groups), -1))
    for _ in range(SWEEPS):
        gained = lost = 0.0
        for key_head, own in enumerate(members):
            place, place_narrow = places[own].flatten(), narrow[own].flatten()
            within = covariance[place][:, place]
            columns[:, place_narrow] = 0
            target = wanted[:, place] - columns @ seen[:, place]
            rows[key_head], more, left = common_rows(target, within, rows[key_head])
            project = torch.block_diag(*[rows[key_head]] * len(own))
            seen[place_narrow] = project @ covariance[place]
            columns[:, place_narrow] = best_columns(target, project @ within, project)
            gained, lost = gained + more, lost + left
        if gained <= GAIN * lost:
            break
    columns = best_columns(wanted, seen, torch.block_diag(*(rows[key] for key in groups)))
    return list(columns.split(width, dim=1)), rows


def alike_rows(heads: Tensor, roots: Tensor, width: int) -> Tensor:
    """Return the best A for heads [m, D, d_v] that share it, if the sum of their covariances weighted each of them."""
    stacked, root = heads.flatten(0, 1), torch.linalg.cholesky((roots @ roots.mT).sum(0))
    return orthonormal(leading_directions(stacked @ root, width).mT @ stacked)  # also where there are fewer directions


def best_columns(wanted: Tensor, seen: Tensor, project: Tensor) -> Tensor:
    """Return the best B [D, H * r] for a given P: the solution of B P C P^T = W C P^T.

    Args:
        wanted: [D, n], W C.
        seen: [H * r, n], P C.
        project: [H * r, n], P.
    """
    return torch.cholesky_solve(project @ wanted.mT, torch.linalg.cholesky(seen @ project.mT)).mT


@torch.no_grad()
def narrow_values(
    weights: ValueWeights,
    groups: Sequence[int],
    width: int,
    moments: HeadMoments,
    find: Callable[[ValueWeights, Sequence[int], int, HeadMoments], NarrowHeads] = narrow_heads,
) -> NarrowValues:
    """Narrow every value head of a site to `width` dimensions.

    Args:
        weights: the weights of the site.
        groups: [H], the value head of every head.
        width: r, at most d_v; at d_v only the basis of the heads changes.
        moments: the moments of its heads' outputs.
        find: finds B[h] and A[h].
    """
    heads = find(weights, groups, width, moments)

    def narrowed(values: Tensor) -> Tensor:  # [H_k * d_v, ...] -> [H_k * r, ...]
        each = per_head(float64(values), len(heads.rows))
        return torch.cat([rows @ value for rows, value in zip(heads.rows, each, strict=True)])

    narrow = ValueWeights(
        narrowed(weights.value),
        None if weights.value_bias is None else narrowed(weights.value_bias),
        torch.cat(list(heads.columns), dim=1),
        None if weights.output_bias is None else float64(weights.output_bias) + heads.lost @ moments.mean,
    )
    total = variance(float64(weights.output), moments.covariance)
    return NarrowValues(narrow, min(variance(heads.lost, moments.covariance) / total, 1.0) if total else 0.0)


def leading_directions(matrix: Tensor, count: int) -> Tensor:
    """Return the left singular vectors of the `count` largest singular values: [D, d] -> [D, count]."""
    basis, small = torch.linalg.qr(matrix)
    return basis @ torch.linalg.svd(small)[0][:, :count]


def variance(weight: Tensor, covariance: Tensor) -> float:
    """Return tr(W C W^T); rounding does not make it negative."""
    return max(float(((weight @ covariance) * weight).sum()), 0.0)


STEPS = 25  # of L-BFGS, at most
TOLERANCE = 1e-4  # steps end with one that gains less than this share of what was lost


def common_rows(target: Tensor, covariance: Tensor, rows: Tensor) -> tuple[Tensor, float, float]:
    """Find the rows A that heads share, by L-BFGS.

    Args:
        target: [D, m * d_v], W C of what the heads are to compute together.
        covariance: [m * d_v, m * d_v], C of the heads' outputs; positive definite.
        rows: [r, d_v], the start.

    Returns:
        A, with orthonormal rows; the gain in explained variance over `rows`, at least 0; and the variance that is not
        explained.
    """
    heads, shown, rows = len(covariance) // rows.shape[1], target.mT @ target, orthonormal(rows)
    start, _ = explained(rows, covariance, shown, heads)
    lost = float(torch.linalg.solve(covariance, shown).trace()) - start
    if lost <= 0:
        return rows, 0.0, 0.0
    found = torch.nn.Parameter(rows.clone())

    def closure() -> float:
        value, gradient = explained(found.detach(), covariance, shown, heads)
        found.grad = gradient / -lost
        return (start - value) / lost

    torch.optim.LBFGS(
        [found], max_iter=STEPS, tolerance_grad=0.0, tolerance_change=TOLERANCE, line_search_fn="strong_wolfe"
    ).step(closure)
    better = orthonormal(found.detach())
    gained = explained(better, covariance, shown, heads)[0] - start
    return (better, gained, lost - gained) if gained > 0 else (rows, 0.0, lost)


def explained(rows: Tensor, covariance: Tensor, shown: Tensor, heads: int) -> tuple[float, Tensor]:
    """Return the variance that heads explain, tr((P C P^T)^-1 P S P^T) with P = diag(A, ..., A), and its gradient in A.

    Args:
        rows: [r, d_v], A.
        covariance: [m * d_v, m * d_v], C.
        shown: [m * d_v, m * d_v], S = target^T target.
        heads: m.
    """
    each = torch.block_diag(*[rows] * heads)  # (m * r, m * d_v)
    seen, wanted = each @ covariance, each @ shown
    root, failed = torch.linalg.cholesky_ex(seen @ each.mT)
    if failed:
        return 0.0, torch.zeros_like(rows)  # rows have become dependent: no step should lead here
    by_seen, by_wanted = (torch.cholesky_solve(part, root) for part in (seen, wanted))
    slope = 2 * (by_wanted - (by_wanted @ each.mT) @ by_seen)
    blocks = slope.unflatten(0, (heads, -1)).unflatten(2, (heads, -1))  # (m, r, m, d_v)
    return float((by_wanted * each).sum()), blocks.diagonal(dim1=0, dim2=2).sum(-1)


def orthonormal(rows: Tensor) -> Tensor:
    """Return orthonormal rows with the same span."""
    return torch.linalg.qr(rows.mT)[0].mT
