"""What every kind of query/key projection answers; a replaced attention module holds one as `query_key`.

A kind is one file beside this one, named in `query_key_kinds`; how it is fitted to a site's weights stands in
`collaborative/kinds.py`.

Shapes: B batch, T query tokens, S key tokens, H heads, R width of the query/key projection over all heads, W width of
what is cached per token, w width of the dot product of a head.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from collab_heads.sites.site import AttentionWeights
from collab_heads.sites.state import QueryKeyState


class QueryKey(nn.Module, ABC):
    """A query/key projection: from inputs to queries and keys whose dot products are the scores, before the scale.

    Parameters: `shared_query.weight` [R, D_q] and `shared_key.weight` [R, D_k], and what a kind adds to them. The names
    are stored; no stock projection has them.

    Attributes:
        has_one_key: whether all heads compare with the same key, so that their queries can be rows of one product.
        state: what is stored of the projection.
        num_heads: H.
    """

    has_one_key: ClassVar[bool] = False
    shared_query: nn.Linear
    shared_key: nn.Linear

    def __init__(self, state: QueryKeyState, num_heads: int):
        super().__init__()
        self.state = state
        self.num_heads = num_heads

    @property
    @abstractmethod
    def cache_width(self) -> int:
        """W, the elements cached per token for the key."""

    @property
    def cached_heads(self) -> int:
        """In how many heads a cache stores keys and values: one that holds those of all heads, side by side."""
        return 1

    @property
    @abstractmethod
    def context_parameter(self) -> Tensor:
        """The parameter without which a score depends on the key alone: its content term."""

    @property
    @abstractmethod
    def content_parameter(self) -> Tensor | None:
        """The parameter without which a score only compares query and key: its context term. None without a bias."""

    @property
    def products_per_token(self) -> tuple[int, int]:
        """Multiplications in products of matrices that make the query of a token, and its key."""
        return self.shared_query.weight.numel(), self.shared_key.weight.numel()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The queries. A forward pass asks for them by a call, so that hooks that bring weights in are called, too."""
        return self.queries(hidden_states)

    @abstractmethod
    def queries(self, hidden_states: Tensor) -> Tensor:
        """[B, T, D_q] -> [B, H, T, w]."""

    @abstractmethod
    def keys(self, states: Tensor) -> Tensor:
        """[B, S, D_k] -> [B, S, W], what is cached."""

    @abstractmethod
    def split(self, key: Tensor) -> Tensor:
        """[B, 1, S, W] -> [B, H, S, w], a view."""

    def meet(
        self, query_states: Tensor, key_states: Tensor, positions: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """What scores are `products` of: [B, T, D_q], [B, S, D_k] -> [B, H, T, w], [B, H, S, w] or [B, 1, S, w].

        Args:
            query_states: what queries are made of.
            key_states: what keys are made of.
            positions: where they are rotations, cosines and sines [B or 1, T, d_k] of the tokens; else None.
        """
        return self.queries(query_states), self.split(self.keys(key_states).unsqueeze(1))

    def scores(
        self, query_states: Tensor, key_states: Tensor, positions: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Scores before scale and masks: [B, T, D_q], [B, S, D_k] -> [B, H, T, S]; for the arguments see `meet`."""
        return products(*self.meet(query_states, key_states, positions))

    @abstractmethod
    def keep_heads(self, kept: list[int]) -> None:
        """Forget all other heads, in place; `kept` are indices among those that are left, ascending."""

    @abstractmethod
    def initialize_from(self, weights: AttentionWeights) -> None:
        """Begin training from scratch, from freshly initialised stock weights; at full width they lose nothing."""


def products(query: Tensor, key: Tensor) -> Tensor:
    """Of every query with every key: [B, H, T, w], [B, H or 1, S, w] -> [B, H, T, S]."""
    if key.shape[1] == 1:  # all heads are rows of one product with the one key
        return (query.flatten(1, 2) @ key[:, 0].mT).unflatten(1, query.shape[1:3])
    return query @ key.mT


def is_swapped(module: nn.Module) -> bool:
    """Whether an attention module holds a collaborative query/key projection."""
    return isinstance(getattr(module, "query_key", None), QueryKey)


def split_heads(packed: Tensor, heads: int) -> Tensor:
    """[B, T, H * d], or [B, 1, T, H * d] as in a cache, -> [B, H, T, d], a view."""
    batch, *_, length, width = packed.shape
    return packed.view(batch, length, heads, width // heads).transpose(1, 2)
