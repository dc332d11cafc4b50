"""Fit one site: from its weights, and what calibration saw of it, to a new query/key projection."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from collab_heads.collaborative.calibrate import Moments
from collab_heads.collaborative.decompose import (
    Decomposition,
    apply_root,
    decompose_per_head,
    decompose_shared,
    input_root,
)
from collab_heads.collaborative.solvers import squared_norm
from collab_heads.layers.query_key import build_query_key, content_bias
from collab_heads.model.attention_calls import Call
from collab_heads.numerics import float64
from collab_heads.sites import AttentionWeights
from collab_heads.state import QueryKeyState

# Share of the mean input variance that is added to every direction, so that none the calibration missed is lost.
RIDGE = 1e-4
# Share of the mean square of the keys that is added to their moments around the mean. Where all keys are alike (one
# token) these are rounding errors, 1e-14 of the squares for float32 inputs; all directions then weigh the same.
FLOOR = 1e-10


@dataclass(frozen=True)
class Seen:
    """What calibration saw of one site: moments of both sides and, for refinement, the calls of its module."""

    query: Moments
    key: Moments
    calls: Sequence[Call] = ()


@dataclass(frozen=True)
class Target:
    """What is decomposed: per-head weights, float64, and the roots of the input moments that weight the error.

    For `per_head` the query bias is a last column of the query, decomposed along with it; in `shared` it becomes the
    content bias, which is exact.
    """

    query: Tensor
    key: Tensor
    query_root: Tensor | None
    key_root: Tensor | None

    @classmethod
    @torch.no_grad()
    def of(cls, weights: AttentionWeights, kind: str, seen: Seen | None) -> "Target":
        """Read the target off the weights of a site."""
        query, query_root, key_root = float64(weights.query.detach()), None, None
        augment = kind == "per_head" and weights.query_bias is not None
        if augment:
            query = torch.cat([query, float64(weights.query_bias.detach())[..., None]], dim=-1)
        if seen is not None:
            query_root = input_root(seen.query.augmented() if augment else seen.query.second(), RIDGE)
            # what is constant over the keys of a sequence cancels in the softmax
            key_root = input_root(seen.key.centred(), RIDGE, FLOOR * seen.key.second().diagonal().mean())
        return cls(query, float64(weights.key.detach()), query_root, key_root)

    def decompose(self, state: QueryKeyState, num_heads: int, method: str, tol: float, seed: int) -> Decomposition:
        """Decompose to the width and kind of `state`."""
        roots = {"query_root": self.query_root, "key_root": self.key_root}
        if state.kind == "per_head":
            return decompose_per_head(self.query, self.key, state.dim // num_heads, **roots)
        return decompose_shared(self.query, self.key, state.dim, method=method, tol=tol, seed=seed, **roots)

    def score_error(self, dtype: torch.dtype) -> Callable[[nn.Module], Tensor]:
        """Return a function that gives the squared relative score error of a projection, differentiable."""
        query, key = (apply_root(w, r) for w, r in ((self.query, self.query_root), (self.key, self.key_root)))
        total = squared_norm(query, key)
        query, key, total = query.to(dtype), key.to(dtype), total.to(dtype)
        query_root, key_root = (None if r is None else r.to(dtype) for r in (self.query_root, self.key_root))
        heads = query.shape[0]

        def error(query_key: nn.Module) -> Tensor:
            rows = query_key.shared_query.weight
            if query_key.shared_query.bias is not None:
                rows = torch.cat([rows, query_key.shared_query.bias[:, None]], dim=1)
            left = rows if query_root is None else rows @ query_root
            right = query_key.shared_key.weight
            right = right if key_root is None else right @ key_root
            if query_key.state.kind == "per_head":
                left, right = left.unflatten(0, (heads, -1)), right.unflatten(0, (heads, -1))
                cross = ((left @ query.mT) * (right @ key.mT)).sum()
                return (total - 2 * cross + squared_norm(left, right)) / total
            overlap = (left @ query.flatten(0, 1).mT) * (right @ key.flatten(0, 1).mT)  # (R, H * d_k)
            mixing = query_key.mixing
            cross = (overlap.unflatten(1, (heads, -1)).sum(-1) * mixing.mT).sum()
            own = ((mixing @ ((left @ left.mT) * (right @ right.mT))) * mixing).sum()
            return (total - 2 * cross + own) / total

        return error


@torch.no_grad()
def new_query_key(weights: AttentionWeights, state: QueryKeyState, found: Decomposition) -> nn.Module:
    """Build the projection that a decomposition describes, in float64."""
    dims = weights.query.shape[-1], weights.key.shape[-1]
    query_key = build_query_key(state, weights.num_heads, *dims, device=found.query.device, dtype=torch.float64)
    columns = query_key.shared_query.in_features
    query_key.shared_query.weight.copy_(found.query[:, :columns])
    query_key.shared_key.weight.copy_(found.key)
    if state.kind == "shared":
        query_key.mixing.copy_(found.mixing)
        if state.bias:
            query_key.content_bias.weight.copy_(content_bias(float64(weights.query_bias), float64(weights.key)))
    elif state.bias:
        query_key.shared_query.bias.copy_(found.query[:, columns])
    return query_key
