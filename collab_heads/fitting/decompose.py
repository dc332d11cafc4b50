"""Find one query/key projection that all heads of a site share.

The query/key weights of a site are the tensor T[h] = W_Q[h]^T W_K[h] (H slices of D_q x D_k, each of rank d_k). A
decomposition of rank R, T[h] ~ P^T diag(m_h) Q, gives the shared query P (R x D_q), the mixing m (H x R) and the shared
key Q (R x D_k). T is never built: norms, updates and errors come from the factors.

With input roots L (L L^T = the second moments of the site's inputs) the same algorithms minimise the error of the
*scores* on those inputs, since E[(x^T T y)^2] = ||L_q^T T L_k||^2 for independent x and y.

Everything here is a pure function of tensors, computed in float64 for inputs of any dtype.

Sources: Cordonnier, Loukas, Jaggi 2020, arXiv:2006.16362 (the layer); Kolda, Bader 2009, SIAM Review 51(3) (ALS).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from collab_heads.base.numerics import few_threads, float64, with_ridge
from collab_heads.errors import ArgumentError, ShapeError
from collab_heads.fitting.solvers import MAX_SWEEPS, METHODS, Method, head_svd, relative
from collab_heads.layers.shared_query_key import block_mixing


@dataclass(frozen=True)
class Decomposition:
    """The query/key projection that replaces the H separate ones.

    Attributes:
        query: [R, D_q]; for separate heads, R = H * r with the rows of head 0 first.
        key: [R, D_k].
        mixing: [H, R], or None if every row belongs to one head.
        relative_error: ||T - T'|| / ||T|| over all heads, in the norm that was minimised.
        sweeps: ALS sweeps done.
        pairs: [H_k, n], the frequency pairs that key heads keep, with rotary positions; else None.
    """

    query: Tensor
    key: Tensor
    mixing: Tensor | None
    relative_error: float
    sweeps: int = 0
    pairs: Tensor | None = None


def input_root(moments: Tensor, ridge: float, floor: float | Tensor = 0.0) -> Tensor:
    """Return the lower-triangular L with L L^T = moments + (ridge * tr(moments)/D + floor) * I.

    Where that is not positive definite, for rounding, a multiple of the addend is added (`with_ridge`).

    Args:
        moments: [D, D], symmetric, positive semi-definite up to rounding. If all are zero, and the floor is not
            positive, L is the identity.
        ridge: share of the mean diagonal to add, so that directions the data never showed keep some weight.
        floor: value to add in any case, above the rounding errors of the moments.

    Returns:
        [D, D], float64.

    Raises:
        torch.linalg.LinAlgError: if the moments are far from positive semi-definite.
    """
    moments = float64(moments)
    identity = torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
    added = ridge * moments.diagonal().mean() + floor
    if not (moments.any() or added > 0):
        return identity
    return with_ridge(lambda times: torch.linalg.cholesky(moments + times * added * identity))


def decompose_shared(
    query: Tensor,
    key: Tensor,
    rank: int,
    *,
    query_root: Tensor | None = None,
    key_root: Tensor | None = None,
    method: Method = "als",
    tol: float = 1e-4,
    seed: int = 0,
    max_sweeps: int = MAX_SWEEPS,
) -> Decomposition:
    """Decompose H query/key weight pairs into one shared pair and a mixing matrix.

    Args:
        query: [H, d_k, D_q].
        key: [H, d_k, D_k].
        rank: R, at most H * d_k. At H * d_k the weights are copied, with 0/1 mixing, and nothing is lost.
        query_root: [D_q, D_q] lower-triangular root of the second moments of the query-side inputs; None for identity.
        key_root: [D_k, D_k], likewise for the key side.
        method: "als" (structured, deterministic) or "parafac" (tensorly on the dense tensor, from random factors).
        tol: stop when a sweep improves the relative error by less than this.
        seed: seed of the initial random factors of "parafac".
        max_sweeps: the largest number of sweeps.

    Raises:
        ArgumentError: if the rank is out of range, or the method unknown.
        ShapeError: if query and key differ in heads or head width.
    """
    heads, width = check_pair(query, key)
    if not 1 <= rank <= heads * width:
        raise ArgumentError(f"rank {rank} is outside 1..{heads * width} ({heads} heads of width {width})")
    if method not in METHODS:
        raise ArgumentError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
    if rank == heads * width:
        mixing = block_mixing(heads, rank).to(query.device)
        return Decomposition(float64(query).flatten(0, 1), float64(key).flatten(0, 1), mixing, 0.0)
    weighted_query, weighted_key = apply_root(query, query_root), apply_root(key, key_root)
    with few_threads(heads * width):
        shared_query, shared_key, mixing, error, sweeps = METHODS[method](
            weighted_query, weighted_key, rank, tol, seed, max_sweeps
        )
    return Decomposition(
        undo_root(shared_query, query_root), undo_root(shared_key, key_root), mixing, float(error), sweeps
    )


def decompose_per_head(
    query: Tensor,
    key: Tensor,
    width: int,
    *,
    query_root: Tensor | None = None,
    key_root: Tensor | None = None,
) -> Decomposition:
    """Narrow every head to its best query/key pair of rank `width` (truncated SVD: optimal in the norm used).

    Args:
        query: [H, d_k, D_q]; with the query bias as a last column, the bias is decomposed, too.
        key: [H, d_k, D_k].
        width: r, the width of a narrowed head, at most d_k. At d_k the weights are copied.
        query_root: [D_q, D_q] lower-triangular root of the second moments of the query-side inputs; None for identity.
        key_root: [D_k, D_k], likewise for the key side.

    Raises:
        ArgumentError: if the width is out of range.
        ShapeError: if query and key differ in heads or head width.
    """
    _, full_width = check_pair(query, key)
    if not 1 <= width <= full_width:
        raise ArgumentError(f"head width {width} is outside 1..{full_width}")
    if width == full_width:
        return Decomposition(float64(query).flatten(0, 1), float64(key).flatten(0, 1), None, 0.0)
    left, values, right = head_svd(apply_root(query, query_root), apply_root(key, key_root))
    root = values[:, :width, None].sqrt()
    shared_query = (left[:, :width] * root).flatten(0, 1)  # (H*r, D_q)
    shared_key = (right[:, :width] * root).flatten(0, 1)
    error = relative(values[:, width:].square().sum(), values.square().sum())
    return Decomposition(undo_root(shared_query, query_root), undo_root(shared_key, key_root), None, error)


def check_pair(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Return (H, d_k) of a query/key pair, or raise ShapeError."""
    if query.ndim != 3 or key.ndim != 3 or query.shape[:2] != key.shape[:2]:
        raise ShapeError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} must be (H, d_k, D_q) and (H, d_k, D_k)"
        )
    return query.shape[0], query.shape[1]


def apply_root(weight: Tensor, root: Tensor | None) -> Tensor:
    """Multiply weights by a root, W -> W L, in float64; None stands for the identity."""
    return float64(weight) if root is None else float64(weight) @ root


def undo_root(weight: Tensor, root: Tensor | None) -> Tensor:
    """Undo `apply_root`, W -> W L^-1."""
    return weight if root is None else torch.linalg.solve_triangular(root, weight, upper=False, left=False)
