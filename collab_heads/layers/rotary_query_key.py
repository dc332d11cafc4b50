"""The kind "rotary": ordinary query/key heads whose positions are rotations between projection and score.

Rotations differ from token to token, so heads cannot mix dimensions here; but query heads may share key heads.

Shapes: as in `query_key`; H_k key heads, d = R / H the width of a head.
"""

import dataclasses

import torch
from torch import Tensor, nn

from collab_heads.layers.query_key import QueryKey, split_heads
from collab_heads.layers.removed import keep_rows
from collab_heads.sites import AttentionWeights, count_key_heads, group_size, kept_groups
from collab_heads.state import QueryKeyState


class RotaryQueryKey(QueryKey):
    """Query and key heads as they are before norms and rotations, which stay in the attention module.

    Parameters: `shared_query.weight` [R, D_q] and `shared_key.weight` [H_k * d, D_k], with biases [R] and [H_k * d]
    where the originals had them; the rows of head 0 come first.

    Attributes:
        groups: the key/value head of every head.
        group_size: how many heads share each, if that is one number and they follow one another; else None.
        num_key_heads: H_k.
    """

    def __init__(self, state: QueryKeyState, num_heads: int, dim_query: int, dim_key: int):
        super().__init__(state, num_heads)
        self.note_groups()
        self.shared_query = nn.Linear(dim_query, state.dim, bias=state.bias)
        self.shared_key = nn.Linear(dim_key, self.cache_width, bias=state.bias)

    def note_groups(self) -> None:
        """Take over what the state says of groups."""
        self.groups = tuple(range(self.num_heads)) if self.state.groups is None else self.state.groups
        self.group_size, self.num_key_heads = group_size(self.groups), count_key_heads(self.num_heads, self.groups)

    @property
    def cache_width(self) -> int:
        """H_k * d."""
        return self.num_key_heads * (self.state.dim // self.num_heads)

    @property
    def context_parameter(self) -> Tensor:
        """The query's weight."""
        return self.shared_query.weight

    @property
    def content_parameter(self) -> Tensor | None:
        """The query's bias."""
        return self.shared_query.bias

    def queries(self, hidden_states: Tensor) -> Tensor:
        """[B, T, D_q] -> [B, H, T, d], before norms and rotations."""
        return split_heads(self.shared_query(hidden_states), self.num_heads)

    def keys(self, states: Tensor) -> Tensor:
        """[B, S, D_k] -> [B, S, H_k * d], before norms and rotations."""
        return self.shared_key(states)

    def split(self, key: Tensor) -> Tensor:
        """[B, 1, S, H_k * d] -> [B, H_k, S, d], a view; one for each key head."""
        return split_heads(key, self.num_key_heads)

    def for_each_head(self, tensor: Tensor) -> Tensor:
        """[B, H_k, ...] -> [B, H, ...]: that of the key/value head of every head."""
        return torch.stack([tensor[:, key_head] for key_head in self.groups], dim=1)

    def scores(self, query_states: Tensor, key_states: Tensor) -> Tensor:
        """Scores without positions, as all tokens at one place would have them, before scale and masks."""
        key = self.for_each_head(self.split(self.keys(key_states).unsqueeze(1)))
        return self.queries(query_states) @ key.mT

    @torch.no_grad()
    def keep_heads(self, kept: list[int]) -> None:
        """Forget all other heads, and the key heads that none of the kept ones uses."""
        key_heads, groups = kept_groups(self.groups, kept)
        keep_rows(self.shared_query, kept, self.num_heads)
        keep_rows(self.shared_key, key_heads, self.num_key_heads)
        self.num_heads = len(kept)
        noted = None if self.state.groups is None else groups
        self.state = dataclasses.replace(self.state, dim=self.shared_query.out_features, groups=noted)
        self.note_groups()

    @torch.no_grad()
    def initialize_from(self, weights: AttentionWeights) -> None:
        """The stock weights."""
        self.shared_query.weight.copy_(weights.query.flatten(0, 1))
        self.shared_key.weight.copy_(weights.key.flatten(0, 1))
        for linear, bias in ((self.shared_query, weights.query_bias), (self.shared_key, weights.key_bias)):
            if linear.bias is not None and bias is not None:
                linear.bias.copy_(bias.flatten())
