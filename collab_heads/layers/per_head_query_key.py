"""The kind "per_head": ordinary multi-head attention whose query/key heads are narrow.

Shapes: as in `query_key`; r = R / H is the width of a query/key head.
"""

import dataclasses

import torch
from torch import Tensor, nn

from collab_heads.layers.query_key import QueryKey, split_heads
from collab_heads.layers.removed import keep_rows
from collab_heads.sites.site import AttentionWeights
from collab_heads.sites.state import QueryKeyState


class PerHeadQueryKey(QueryKey):
    """Query/key heads of width r = R / H each, narrower than the value heads.

    Parameters: `shared_query.weight` [R, D_q] (with `shared_query.bias` [R] where the query had one),
    `shared_key.weight` [R, D_k]; the rows of head 0 come first.
    """

    def __init__(self, state: QueryKeyState, num_heads: int, dim_query: int, dim_key: int):
        super().__init__(state, num_heads)
        self.shared_query = nn.Linear(dim_query, state.dim, bias=state.bias)
        self.shared_key = nn.Linear(dim_key, state.dim, bias=False)

    @property
    def cache_width(self) -> int:
        return self.state.dim

    def split(self, key: Tensor) -> Tensor:
        """Split keys into heads: [B, 1, S, R] -> [B, H, S, r], a view."""
        return split_heads(key, self.num_heads)

    @torch.no_grad()
    def keep_heads(self, kept: list[int]) -> None:
        keep_rows(self.shared_query, kept, self.num_heads)
        keep_rows(self.shared_key, kept, self.num_heads)
        self.num_heads, self.state = len(kept), dataclasses.replace(self.state, dim=self.shared_key.out_features)

    @torch.no_grad()
    def initialize_from(self, weights: AttentionWeights) -> None:
        """Initialise from the leading rows of every head."""
        width = self.state.dim // self.num_heads
        self.shared_query.weight.copy_(weights.query[:, :width].flatten(0, 1))
        self.shared_key.weight.copy_(weights.key[:, :width].flatten(0, 1))
        if weights.query_bias is not None:
            self.shared_query.bias.copy_(weights.query_bias[:, :width].flatten())
