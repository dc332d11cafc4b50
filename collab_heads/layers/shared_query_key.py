"""The kind "shared": the collaborative layer of the paper, in which every head mixes all shared dimensions.

Shapes: as in `query_key`; W = R + H rounded up to a multiple of 8 (R alone where the query had no bias).
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from collab_heads.layers.query_key import QueryKey
from collab_heads.layers.removed import kept_parameter
from collab_heads.sites.site import AttentionWeights
from collab_heads.sites.state import QueryKeyState

ALIGNMENT = 8  # elements; fused attention kernels want head widths in multiples of it
MIXING_STD = 0.2  # of the random initialisation in the source's code


class SharedQueryKey(QueryKey):
    """One query and one key projection for all heads, and a mixing vector per head.

    score_h(x, y) = scale * (((shared_query x) * mixing_h) . (shared_key y) + content_bias_h . y)

    The content bias, exact for any query bias, is computed by H extra key columns and a one-hot part of the query. So
    the score stays a plain dot product, which every attention backend computes and every cache stores.

    Parameters: `shared_query.weight` [R, D_q], `shared_key.weight` [R, D_k], `mixing` [H, R], `content_bias.weight`
    [H, D_k] where the query had a bias.

    Source: Cordonnier, Loukas, Jaggi 2020, arXiv:2006.16362, section 4.
    """

    has_one_key = True

    def __init__(self, state: QueryKeyState, num_heads: int, dim_query: int, dim_key: int):
        super().__init__(state, num_heads)
        self.shared_query = nn.Linear(dim_query, state.dim, bias=False)
        self.shared_key = nn.Linear(dim_key, state.dim, bias=False)
        self.mixing = nn.Parameter(torch.empty(num_heads, state.dim))
        self.content_bias = nn.Linear(dim_key, num_heads, bias=False) if state.bias else None

    @property
    def cache_width(self) -> int:
        return shared_cache_width(self.state.dim, self.num_heads if self.state.bias else 0)

    @property
    def products_per_token(self) -> tuple[int, int]:
        """As `QueryKey`, with the content bias for the key; the mixing is not a matrix product."""
        query, key = super().products_per_token
        return query, key + (0 if self.content_bias is None else self.content_bias.weight.numel())

    @property
    def context_parameter(self) -> Tensor:
        return self.mixing

    @property
    def content_parameter(self) -> Tensor | None:
        return None if self.content_bias is None else self.content_bias.weight

    def queries(self, hidden_states: Tensor) -> Tensor:
        """Project and mix queries: [B, T, D_q] -> [B, H, T, W]."""
        query = self.shared_query(hidden_states)  # (B, T, R)
        mixing = self.mixing.to(query.dtype)
        if self.content_bias is not None:
            # 1 in the extra columns of the query times one-hot rows of the mixing picks the head's content bias
            mixing = torch.cat([mixing, torch.eye(self.num_heads, dtype=mixing.dtype, device=mixing.device)], dim=-1)
        query = F.pad(query, (0, self.cache_width - query.shape[-1]), value=1.0)
        mixing = F.pad(mixing, (0, self.cache_width - mixing.shape[-1]))
        return query.unsqueeze(-3) * mixing.unsqueeze(-2)

    def keys(self, states: Tensor) -> Tensor:
        """Project keys, with the columns of the content bias: [B, S, D_k] -> [B, S, W]."""
        key = self.shared_key(states)
        if self.content_bias is not None:
            key = torch.cat([key, self.content_bias(states)], dim=-1)
        return F.pad(key, (0, self.cache_width - key.shape[-1]))

    def split(self, key: Tensor) -> Tensor:
        """Expand the one key to all heads: [B, 1, S, W] -> [B, H, S, W], a view."""
        return key.expand(-1, self.num_heads, -1, -1)

    def meet(
        self, query_states: Tensor, key_states: Tensor, positions: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return queries and the one key of all heads: [B, T, D_q], [B, S, D_k] -> [B, H, T, W], [B, 1, S, W]."""
        return self.queries(query_states), self.keys(key_states).unsqueeze(1)

    @torch.no_grad()
    def keep_heads(self, kept: list[int]) -> None:
        """Remove all other heads, and the dimensions that no kept head uses; scores of kept heads do not change."""
        mixing = self.mixing[kept]
        used = (mixing != 0).any(0)
        used[0] |= ~used.any()  # a width of 0 could not be stored
        used = used.nonzero().flatten()
        self.mixing = kept_parameter(self.mixing, mixing[:, used])
        for linear in (self.shared_query, self.shared_key):
            linear.weight = kept_parameter(linear.weight, linear.weight[used])
            linear.out_features = len(used)
        if self.content_bias is not None:
            self.content_bias.weight = kept_parameter(self.content_bias.weight, self.content_bias.weight[kept])
            self.content_bias.out_features = len(kept)
        self.num_heads, self.state = len(kept), dataclasses.replace(self.state, dim=len(used))

    @torch.no_grad()
    def initialize_from(self, weights: AttentionWeights) -> None:
        """Initialise from nearly equal shares of every head's leading rows, and the mixing that the state names.

        At full width with "concatenate" the result is exactly the stock model.
        """
        self.shared_query.weight.copy_(leading_rows(weights.query, self.state.dim))
        self.shared_key.weight.copy_(leading_rows(weights.key, self.state.dim))
        if self.state.mixing_init == "ones":
            self.mixing.fill_(1.0)
        elif self.state.mixing_init == "normal":
            self.mixing.normal_(0.0, MIXING_STD)
        elif self.state.mixing_init == "xavier":
            nn.init.xavier_uniform_(self.mixing)
        else:
            self.mixing.copy_(block_mixing(self.num_heads, self.state.dim))
        if self.content_bias is not None and weights.query_bias is not None:
            self.content_bias.weight.copy_(content_bias(weights.query_bias, weights.key))


def content_bias(query_bias: Tensor, key_weight: Tensor) -> Tensor:
    """Turn a per-head query bias into one score offset per head and key token.

    Expanding (W_Q x + b_Q).(W_K y + b_K) gives three bias terms. Those with b_K are constant over the keys y, so the
    softmax cancels them; b_Q.W_K y remains and is returned here. Exact.

    Args:
        query_bias: [H, d_k], before scaling.
        key_weight: [H, d_k, D].

    Returns:
        [H, D], in raw-score units: the score's scale still applies.

    Source: Cordonnier, Loukas, Jaggi 2020, arXiv:2006.16362, section 4.
    """
    return torch.einsum("hd,hdj->hj", query_bias, key_weight)


def shared_cache_width(dim: int, extra: int) -> int:
    """Return the width of a shared key with `extra` content-bias columns, rounded up to `ALIGNMENT`."""
    return -(-(dim + extra) // ALIGNMENT) * ALIGNMENT


def leading_rows(weight: Tensor, rows: int) -> Tensor:
    """Return nearly equal shares of every head's leading rows, in head order: [H, d_k, D] -> [rows, D]."""
    heads = weight.shape[0]
    counts = block_mixing(heads, rows).sum(1).int().tolist()
    return torch.cat([head[:count] for head, count in zip(weight, counts, strict=True)])


def block_mixing(heads: int, rank: int) -> Tensor:
    """Return a 0/1 mixing that gives every head a nearly equal block of shared dimensions: [H, R], float64."""
    head_of_dimension = torch.arange(rank) * heads // rank
    return (head_of_dimension == torch.arange(heads)[:, None]).double()
