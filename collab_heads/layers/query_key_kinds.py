"""The table of the kinds of query/key projection, and functions that build one."""

from collections.abc import Mapping
from typing import Protocol

import torch

from collab_heads.layers.per_head_query_key import PerHeadQueryKey
from collab_heads.layers.query_key import QueryKey
from collab_heads.layers.rotary_query_key import RotaryQueryKey
from collab_heads.layers.shared_query_key import SharedQueryKey
from collab_heads.sites.site import AttentionWeights
from collab_heads.sites.state import QueryKeyKind, QueryKeyState


class BuildsQueryKey(Protocol):
    """The class of a kind, as a constructor."""

    def __call__(self, state: QueryKeyState, num_heads: int, dim_query: int, dim_key: int) -> QueryKey:
        """Return a projection for inputs of the widths D_q and D_k."""


QUERY_KEY_KINDS: Mapping[QueryKeyKind, BuildsQueryKey] = {
    "shared": SharedQueryKey,
    "per_head": PerHeadQueryKey,
    "rotary": RotaryQueryKey,
}

EXACT_KIND: QueryKeyKind = "per_head"  # at full width it consists of the stock weights


def build_query_key(
    state: QueryKeyState,
    num_heads: int,
    dim_query: int,
    dim_key: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> QueryKey:
    """Build the query/key projection of a site's state, uninitialised: no random number is drawn."""
    with torch.device("meta"):
        query_key = QUERY_KEY_KINDS[state.kind](state, num_heads, dim_query, dim_key).to(dtype=dtype)
    return query_key.to_empty(device=device)


@torch.no_grad()
def exact_query_key(weights: AttentionWeights, kind: QueryKeyKind = EXACT_KIND) -> QueryKey:
    """Return a query/key projection with the weights of a stock site, in float64."""
    has_bias = weights.query_bias is not None
    scale, groups = weights.scale, weights.groups
    state = QueryKeyState(kind, weights.dim_query_key, weights.dim_head, scale, has_bias, groups=groups)
    dims = weights.query.shape[-1], weights.key.shape[-1]
    exact = build_query_key(state, weights.num_heads, *dims, device=weights.query.device, dtype=torch.float64)
    exact.initialize_from(weights)
    return exact
