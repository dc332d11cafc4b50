"""The kind "rotary": ordinary query/key heads whose positions are rotations between projection and score.

Rotations differ from token to token, so heads cannot mix dimensions here. But query heads may share key heads, and a
narrower head keeps some of the frequency pairs of its key head.

Shapes: as in `query_key`; H_k key heads, d = R / H the width of a head.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from collab_heads.layers.query_key import QueryKey, split_heads
from collab_heads.layers.removed import keep_rows
from collab_heads.sites.site import AttentionWeights, count_key_heads, group_size, kept_groups
from collab_heads.sites.state import QueryKeyState

Positions = tuple[Tensor, Tensor]  # cosines and sines [B or 1, T, d_k], of the original width of a head
Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # query, key, cosines, sines


class RotaryQueryKey(QueryKey):
    """Query and key heads before norms and rotations, which stay in the attention module.

    Parameters: `shared_query.weight` [R, D_q] and `shared_key.weight` [H_k * d, D_k], with biases [R] and [H_k * d]
    where the originals had them; the rows of head 0 come first. Heads that are narrower than the original ones have a
    buffer `pairs` [H_k, d / 2]: the indices of the frequency pairs that each key head and all its query heads keep. It
    is stored with the weights.

    Attributes:
        groups: the key/value head of every head.
        group_size: the number of heads that share each key head, if it is the same for all and these heads are
            consecutive; else None.
        num_key_heads: H_k.
    """

    pairs: Tensor | None

    def __init__(self, state: QueryKeyState, num_heads: int, dim_query: int, dim_key: int):
        super().__init__(state, num_heads)
        self.note_groups()
        self.shared_query = nn.Linear(dim_query, state.dim, bias=state.bias)
        self.shared_key = nn.Linear(dim_key, self.cache_width, bias=state.bias)
        pairs = None
        if state.dim < num_heads * state.dim_head:
            pairs = torch.arange(state.dim // num_heads // 2).repeat(self.num_key_heads, 1)
        self.register_buffer("pairs", pairs)

    def note_groups(self) -> None:
        """Update the attributes that follow from the groups of the state."""
        self.groups = tuple(range(self.num_heads)) if self.state.groups is None else self.state.groups
        self.group_size, self.num_key_heads = group_size(self.groups), count_key_heads(self.num_heads, self.groups)

    @property
    def cache_width(self) -> int:
        return self.num_key_heads * (self.state.dim // self.num_heads)

    @property
    def cached_heads(self) -> int:
        """H_k: a cache stores one head per key/value head, as for the stock classes."""
        return self.num_key_heads

    def split(self, key: Tensor) -> Tensor:
        """Split keys into key heads: [B, 1, S, H_k * d] -> [B, H_k, S, d], a view."""
        return split_heads(key, self.num_key_heads)

    def rotate(self, query: Tensor, key: Tensor, positions: Positions, rotate: Rotate) -> tuple[Tensor, Tensor]:
        """Rotate queries [B, H, T, d] and keys [B, H_k, T, d] to their positions.

        Args:
            query: of all heads.
            key: of all key heads.
            positions: of the tokens.
            rotate: the family's own function, for heads of the original width.
        """
        if self.pairs is None:
            return rotate(query, key, *positions)
        cos, sin = (of_pairs(angles, self.pairs) for angles in positions)
        key = turned(key, cos, sin)
        if self.group_size is None:
            return turned(query, self.for_each_head(cos), self.for_each_head(sin)), key
        groups = query.unflatten(1, (self.num_key_heads, self.group_size))
        return turned(groups, cos.unsqueeze(2), sin.unsqueeze(2)).flatten(1, 2), key

    def for_each_head(self, tensor: Tensor) -> Tensor:
        """Repeat the tensor of each key/value head for its heads: [B, H_k, ...] -> [B, H, ...]."""
        return torch.stack([tensor[:, key_head] for key_head in self.groups], dim=1)

    def meet(
        self, query_states: Tensor, key_states: Tensor, positions: Positions | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return rotated queries and keys of every head; without positions all tokens count as at one place."""
        query, key = super().meet(query_states, key_states)
        if positions is not None:
            query, key = self.rotate(query, key, positions, turned_both)
        return query, self.for_each_head(key)

    @torch.no_grad()
    def keep_heads(self, kept: list[int]) -> None:
        """Remove all other heads, and the key heads that none of the kept ones uses."""
        key_heads, groups = kept_groups(self.groups, kept)
        keep_rows(self.shared_query, kept, self.num_heads)
        keep_rows(self.shared_key, key_heads, self.num_key_heads)
        if self.pairs is not None:
            self.pairs = self.pairs[key_heads]
        self.num_heads = len(kept)
        noted = None if self.state.groups is None else groups
        self.state = dataclasses.replace(self.state, dim=self.shared_query.out_features, groups=noted)
        self.note_groups()

    @torch.no_grad()
    def initialize_from(self, weights: AttentionWeights) -> None:
        """Initialise from the stock weights; narrower heads take those of the first pairs."""
        if self.pairs is not None:
            self.pairs.copy_(torch.arange(self.pairs.shape[1]))
        query_pairs = None if self.pairs is None else self.pairs[list(self.groups)]
        for linear, weight, bias, pairs in (
            (self.shared_query, weights.query, weights.query_bias, query_pairs),
            (self.shared_key, weights.key, weights.key_bias, self.pairs),
        ):
            for part, whole in ((linear.weight, weight), (linear.bias, bias)):
                if part is not None and whole is not None:
                    part.copy_(whole.flatten(0, 1) if pairs is None else rows_of(whole, pairs))


def turned_both(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys of the original width to their positions."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return turned(query, cos, sin), turned(key, cos, sin)


def dims_of(pairs: Tensor, dim_head: int) -> Tensor:
    """Return the dimensions of pairs: [..., n] -> [..., 2n], first the first one of each pair, then the second ones."""
    return torch.cat([pairs, pairs + dim_head // 2], dim=-1)


def rows_of(heads: Tensor, pairs: Tensor) -> Tensor:
    """Return the rows of the pairs that heads keep: [H, d, ...], [H, n] -> [H * 2n, ...]."""
    return torch.cat([head[each] for head, each in zip(heads, dims_of(pairs, heads.shape[1]), strict=True)])


def of_pairs(angles: Tensor, pairs: Tensor) -> Tensor:
    """Select cosines or sines of the pairs of every key head: [B, T, d], [H_k, n] -> [B, H_k, T, 2n]."""
    return angles[..., dims_of(pairs, angles.shape[-1])].transpose(1, 2)


def turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [..., T, 2n] to their positions, whose cosines and sines broadcast to them."""
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat([-second, first], dim=-1) * sin).to(heads.dtype)
