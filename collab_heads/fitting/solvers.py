"""The solvers behind `decompose`: SVD of every slice, structured ALS, and tensorly's parafac as a reference.

Each works on float64 factors of T[h] = query[h]^T key[h], query [H, d_k, D_q], key [H, d_k, D_k]; T is never built,
except by the reference.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from collab_heads.base.checks import check_choice
from collab_heads.base.extras import check_extra

Method = Literal["als", "parafac"]
MAX_SWEEPS = 100
# Weight of the pull towards the last iterate, relative to the mean diagonal of the normal matrix. It keeps the solves
# well posed when components become collinear, and cannot make the error grow (proximal ALS).
PROXIMAL = 1e-9


def head_svd(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the singular triplets of every slice query[h]^T key[h] from the d_k x d_k core of its QR factors.

    Returns:
        left [H, d_k, D_q], singular values [H, d_k] in descending order, right [H, d_k, D_k].
    """
    query_basis, query_core = torch.linalg.qr(query.mT)  # (H, D_q, d_k), (H, d_k, d_k)
    key_basis, key_core = torch.linalg.qr(key.mT)
    left, values, right = torch.linalg.svd(query_core @ key_core.mT)
    return (query_basis @ left).mT, values, right @ key_basis.mT


def largest_triplets(query: Tensor, key: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `rank` largest singular triplets over all heads, each used by its own head: the start of ALS.

    Returns:
        P [R, D_q], Q [R, D_k], one-hot mixing [H, R].
    """
    left, values, right = head_svd(query, key)
    heads, width = values.shape
    chosen = values.flatten().topk(rank).indices.sort().values
    scale = values.flatten()[chosen, None].sqrt()
    mixing = torch.zeros(heads, rank, dtype=values.dtype, device=values.device)
    mixing[chosen // width, torch.arange(rank, device=values.device)] = 1.0
    return left.flatten(0, 1)[chosen] * scale, right.flatten(0, 1)[chosen] * scale, mixing


def als(query: Tensor, key: Tensor, rank: int, tol: float, seed: int, max_sweeps: int):
    """Decompose the factored tensor by alternating least squares from `largest_triplets`; the error never grows.

    A sweep takes four products of size (H*d_k x D x R).

    Returns:
        P, Q, mixing, relative error, sweeps.
    """
    heads, width = query.shape[:2]
    stacked_query, stacked_key = query.flatten(0, 1), key.flatten(0, 1)  # (H*d_k, D)
    total = squared_norm(query, key)
    shared_query, shared_key, mixing = largest_triplets(query, key, rank)
    key_overlap = shared_key @ stacked_key.mT  # (R, H*d_k)
    key_gram = shared_key @ shared_key.mT
    error, sweep = relative(total - explained(shared_query, shared_key, mixing), total), 0
    while sweep < max_sweeps:
        sweep += 1
        per_row = mixing.mT.repeat_interleave(width, dim=1)  # (R, H*d_k)
        gram = mixing.mT @ mixing
        shared_query = unit_rows(solve(gram * key_gram, (per_row * key_overlap) @ stacked_query, shared_query))
        query_overlap, query_gram = shared_query @ stacked_query.mT, shared_query @ shared_query.mT
        shared_key = unit_rows(solve(gram * query_gram, (per_row * query_overlap) @ stacked_key, shared_key))
        key_overlap, key_gram = shared_key @ stacked_key.mT, shared_key @ shared_key.mT
        target = (query_overlap * key_overlap).unflatten(1, (heads, width)).sum(-1)  # (R, H): p_r^T T_h q_r
        normal = query_gram * key_gram
        mixing = solve(normal, target, mixing.mT).mT
        residual = total - 2 * (mixing.mT * target).sum() + ((mixing @ normal) * mixing).sum()
        previous, error = error, relative(residual, total)
        if previous - error < tol:
            break
    return *equalize_factors(shared_query, shared_key, mixing), error, sweep


def parafac(query: Tensor, key: Tensor, rank: int, tol: float, seed: int, max_sweeps: int):
    """Decompose the dense tensor with tensorly's CP decomposition from random factors, as a reference for `als`."""
    check_method("parafac")
    import tensorly
    from tensorly.decomposition import parafac as tensorly_parafac

    dense = torch.einsum("hdi,hdj->ihj", query, key)
    with tensorly.backend_context("pytorch"):
        (_, (left, mixing, right)), errors = tensorly_parafac(
            dense, rank, n_iter_max=max_sweeps, tol=tol, init="random", random_state=seed, return_errors=True
        )
    residual = dense - torch.einsum("ir,hr,jr->ihj", left, mixing, right)
    error = relative(residual.square().sum(), dense.square().sum())
    return *equalize_factors(left.mT, right.mT, mixing), error, len(errors)


METHODS: dict[Method, Callable] = {"als": als, "parafac": parafac}


def check_method(method: object) -> None:
    """Check that a method is known and its package installed, before any long computation.

    Raises:
        ArgumentError: on a method that is not known.
        MissingPackageError: if tensorly is needed and not installed.
    """
    check_choice("method", method, METHODS)
    if method == "parafac":
        check_extra("parafac", "swaps with the method 'parafac'")


def squared_norm(query: Tensor, key: Tensor) -> Tensor:
    """Compute ||T||^2 of the slices query[h]^T key[h] from the factors: [H, d, D_q], [H, d, D_k] -> []."""
    return ((query @ query.mT) * (key @ key.mT)).sum()


def explained(shared_query: Tensor, shared_key: Tensor, mixing: Tensor) -> Tensor:
    """Compute ||T'||^2 of components that are orthogonal within each head and used by one head each."""
    return (shared_query.square().sum(1) * shared_key.square().sum(1) * mixing.square().sum(0)).sum()


def solve(normal: Tensor, target: Tensor, last: Tensor) -> Tensor:
    """Solve normal @ x = target, pulled slightly towards `last`: [R, R], [R, N], [R, N] -> [R, N]."""
    # An all-zero normal matrix (weights that are zero) leaves `last` as it is.
    pull = PROXIMAL * normal.diagonal().mean() + torch.finfo(normal.dtype).tiny
    shifted = normal + pull * torch.eye(len(normal), dtype=normal.dtype, device=normal.device)
    right_side = target + pull * last
    factor, failed = torch.linalg.cholesky_ex(shifted)
    if failed:
        return torch.linalg.lstsq(shifted, right_side).solution
    return torch.cholesky_solve(right_side, factor)


def unit_rows(matrix: Tensor) -> Tensor:
    """Scale rows to length one, except zero rows; the mixing, which is solved last, absorbs the scale."""
    norms = matrix.norm(dim=1, keepdim=True)
    return matrix / norms.where(norms > 0, torch.ones_like(norms))


def equalize_factors(shared_query: Tensor, shared_key: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rescale the factors of every component to sizes that suit half precision and weight decay.

    The product of the factors stays the same. The largest mixing entry of a component becomes 1 in magnitude; its query
    and key rows get equal norms.
    """
    query_norm, key_norm = shared_query.norm(dim=1), shared_key.norm(dim=1)
    mixing_size = mixing.abs().amax(dim=0)
    size = query_norm * key_norm * mixing_size
    alive = size > 0
    root = size.sqrt()

    def rescale(matrix: Tensor, norm: Tensor) -> Tensor:
        return matrix * torch.where(alive, root / norm, torch.zeros_like(root))[:, None]

    mixing = mixing / torch.where(alive, mixing_size, torch.ones_like(mixing_size))
    return rescale(shared_query, query_norm), rescale(shared_key, key_norm), mixing


def relative(residual: Tensor, total: Tensor) -> float:
    """Return sqrt(residual / total) of two squared norms; a residual below zero, from rounding, counts as zero."""
    return float((residual.clamp(min=0) / total).sqrt()) if total > 0 else 0.0
