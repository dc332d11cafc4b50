"""The interface of query/key projections; a replaced attention module holds one as `query_key`.

Each kind is one file beside this one, listed in `query_key_kinds`; `fitting/kinds.py` fits it to the weights of a
site.

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

    Parameters: `shared_query.weight` [R, D_q] and `shared_key.weight` [R, D_k], and those that a kind adds. The names
    are stored in checkpoints; no stock projection has them. Where a kind does not say otherwise, each head has rows of
    its own in them, the bias of `shared_query` is that of the queries, and keys are cached as they are projected.

    Attributes:
        has_one_key: whether all heads compare with the same key, so that their queries can be rows of one product.
        state: the stored state of the projection.
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
        """The number of heads in which a cache stores keys and values.

        The default is one, which holds the keys or values of all heads side by side.
        """
        return 1

    @property
    def context_parameter(self) -> Tensor:
        """The parameter of the context term: without it a score depends on the key alone."""
        return self.shared_query.weight

    @property
    def content_parameter(self) -> Tensor | None:
        """The parameter of the content term, which depends on the key alone; None without a query bias."""
        return self.shared_query.bias

    @property
    def products_per_token(self) -> tuple[int, int]:
        """The multiplications in matrix products that make the query of a token, and its key."""
        return self.shared_query.weight.numel(), self.shared_key.weight.numel()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the queries. A forward pass calls this, so that hooks that bring weights in are called, too."""
        return self.queries(hidden_states)

    def queries(self, hidden_states: Tensor) -> Tensor:
        """Project queries, before norms and rotations: [B, T, D_q] -> [B, H, T, w]."""
        return split_heads(self.shared_query(hidden_states), self.num_heads)

    def keys(self, states: Tensor) -> Tensor:
        """Project keys in the layout of the cache, before norms and rotations: [B, S, D_k] -> [B, S, W]."""
        return self.shared_key(states)

    @abstractmethod
    def split(self, key: Tensor) -> Tensor:
        """Split cached keys into heads: [B, 1, S, W] -> [B, H, S, w], a view."""

    def meet(
        self, query_states: Tensor, key_states: Tensor, positions: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys for `products`: [B, T, D_q], [B, S, D_k] -> [B, H, T, w], [B, H or 1, S, w].

        Args:
            query_states: the inputs of the queries.
            key_states: the inputs of the keys.
            positions: where they are rotations, cosines and sines [B or 1, T, d_k] of the tokens; else None.
        """
        return self.queries(query_states), self.split(self.keys(key_states).unsqueeze(1))

    def scores(
        self, query_states: Tensor, key_states: Tensor, positions: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return the scores before scale and masks: [B, T, D_q], [B, S, D_k] -> [B, H, T, S].

        See `meet` for the arguments.
        """
        return products(*self.meet(query_states, key_states, positions))

    @abstractmethod
    def keep_heads(self, kept: list[int]) -> None:
        """Remove all other heads, in place; `kept` are indices among those that are left, ascending."""

    @abstractmethod
    def initialize_from(self, weights: AttentionWeights) -> None:
        """Initialise from fresh stock weights, for training from scratch; exact at full width."""


def products(query: Tensor, key: Tensor) -> Tensor:
    """Multiply every query with every key: [B, H, T, w], [B, H or 1, S, w] -> [B, H, T, S]."""
    if key.shape[1] == 1:  # all heads are rows of one product with the one key
        return (query.flatten(1, 2) @ key[:, 0].mT).unflatten(1, query.shape[1:3])
    return query @ key.mT


def is_swapped(module: nn.Module) -> bool:
    """Return True if an attention module holds a collaborative query/key projection."""
    return isinstance(getattr(module, "query_key", None), QueryKey)


def split_heads(packed: Tensor, heads: int) -> Tensor:
    """Split packed heads: [B, T, H * d], or [B, 1, T, H * d] as in a cache, -> [B, H, T, d], a view."""
    batch, *_, length, width = packed.shape
    return packed.view(batch, length, heads, width // heads).transpose(1, 2)
