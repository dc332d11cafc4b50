"""Find the rows that all heads of one value head share: the best A for W_O[h] ~ B[h] A.

For a given A the best B of all heads is a regression, so the error is a function of A alone. No closed form minimises
it if heads weigh the directions of A differently. L-BFGS does, from the rows that are best if all heads weigh alike.

Shapes: m heads, d_v width of a value head, r that of a narrower one, D width of the model.
"""

import torch
from torch import Tensor

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
