"""The fits of the kinds of query/key projection: one class per kind, and their table.

A new kind is one class here, one file in `layers/` (named in `layers/query_key_kinds.py`) and one word in
`state.QueryKeyKind` (and in `state.DIVIDED` if every head has R / H dimensions). No other code in the package depends
on the kind; `tests/test_kinds.py` checks this.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, cast

from torch import Tensor

from collab_heads.base.checks import check_choice
from collab_heads.base.numerics import float64
from collab_heads.calibration.calibrate import SiteCalibration
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.errors import ArgumentError
from collab_heads.fitting.decompose import Decomposition, decompose_per_head, decompose_shared
from collab_heads.fitting.fit import FitOptions, Projection, SiteFit
from collab_heads.fitting.frequency_pairs import (
    agreement,
    choose_pairs,
    factors_of,
    grams_by_weights,
    groups_of,
    in_pairs,
    pair_grams,
    share_lost,
)
from collab_heads.fitting.solvers import squared_norm
from collab_heads.fitting.widths import HEAD_MULTIPLE, rounded_up
from collab_heads.layers.per_head_query_key import PerHeadQueryKey
from collab_heads.layers.rotary_query_key import RotaryQueryKey, rows_of
from collab_heads.layers.shared_query_key import ALIGNMENT, SharedQueryKey, content_bias
from collab_heads.sites.site import AttentionWeights
from collab_heads.sites.state import DIVIDED, QueryKeyKind


class SharedFit(SiteFit[SharedQueryKey]):
    """The fit of a shared projection, of any width: all heads are decomposed together.

    The query bias becomes the content bias, which is exact.
    """

    cache_rule = (
        "a shared key of nearly full width is stored beside the content bias; choose a smaller width, or per_head, if "
        "the cache matters"
    )

    @classmethod
    def width_unit(cls, dim: int, weights: AttentionWeights) -> int:
        """Return the multiple that kernels prefer, or `dim` if it is smaller."""
        return min(ALIGNMENT, dim)

    @classmethod
    def parameters_per_width(cls, weights: AttentionWeights) -> int:
        """Count a query row, a key row, and a column of the mixing."""
        return super().parameters_per_width(weights) + weights.num_heads

    def decompose(self, dim: int, options: FitOptions) -> Decomposition:
        """Find R components that all heads mix."""
        return decompose_shared(
            self.query,
            self.key,
            dim,
            query_root=self.query_root,
            key_root=self.key_root,
            method=options.method,
            tol=options.tol,
            seed=options.seed,
        )

    def overlap_and_square(
        self, query_key: SharedQueryKey, left: Tensor, right: Tensor, query: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute both for T'[h] = left^T diag(mixing_h) right."""
        heads, mixing = len(query), query_key.mixing
        overlaps = (left @ query.flatten(0, 1).mT) * (right @ key.flatten(0, 1).mT)  # (R, H * d_k)
        overlap = (overlaps.unflatten(1, (heads, -1)).sum(-1) * mixing.mT).sum()
        return overlap, ((mixing @ ((left @ left.mT) * (right @ right.mT))) * mixing).sum()

    def copy_rest(self, query_key: SharedQueryKey, decomposition: Decomposition) -> None:
        """Copy the mixing, and the content bias of the stock weights."""
        query_key.mixing.copy_(cast(Tensor, decomposition.mixing))
        bias, key = self.weights.query_bias, self.weights.key
        if query_key.content_bias is not None and bias is not None:
            query_key.content_bias.weight.copy_(content_bias(float64(bias), float64(key)))


class DividedFit(SiteFit[Projection]):
    """A fit of heads that are not mixed: each has as many dimensions, a multiple of 4, and its query bias with it."""

    meaningless: ClassVar[Mapping[str, str]] = {
        "method": "which is a plain SVD per head",
        "mixing_init": "which does not mix",
    }
    capability = "per_head"
    decomposes_bias = True

    @classmethod
    def possible_width(cls, asked: int, weights: AttentionWeights) -> int:
        """Round R / H up to a multiple of 4, at most the original head width; return the width over all heads."""
        return rounded_up(asked, weights.num_heads, weights.dim_head)

    @classmethod
    def width_unit(cls, dim: int, weights: AttentionWeights) -> int:
        """Return the width of 4 dimensions per head."""
        return weights.num_heads * HEAD_MULTIPLE


class PerHeadFit(DividedFit[PerHeadQueryKey]):
    """The fit of separate heads: every head is decomposed alone."""

    width_rule = "per-head widths are multiples of 4"

    def decompose(self, dim: int, options: FitOptions) -> Decomposition:
        """Find the best R / H components of each head."""
        width = dim // self.weights.num_heads
        return decompose_per_head(self.query, self.key, width, query_root=self.query_root, key_root=self.key_root)

    def overlap_and_square(
        self, query_key: PerHeadQueryKey, left: Tensor, right: Tensor, query: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute both for T'[h] = left[h]^T right[h]."""
        heads = len(query)
        left, right = left.unflatten(0, (heads, -1)), right.unflatten(0, (heads, -1))
        return ((left @ query.mT) * (right @ key.mT)).sum(), squared_norm(left, right)

    def copy_rest(self, query_key: PerHeadQueryKey, decomposition: Decomposition) -> None:
        """Copy the query bias, which is the last column of the query."""
        if query_key.shared_query.bias is not None:
            query_key.shared_query.bias.copy_(decomposition.query[:, -1])


class RotaryFit(DividedFit[RotaryQueryKey]):
    """The fit of rotary heads: every head keeps the whole frequency pairs that carry its score; nothing is mixed."""

    width_rule = "heads with rotary positions keep an even number of frequency pairs, so widths are multiples of 4"
    is_offered = False
    needs_calls = True

    def __init__(self, weights: AttentionWeights, calibration: SiteCalibration | None = None):
        super().__init__(weights, calibration)
        self.calls, self.kept = ((), {}) if calibration is None else (calibration.calls, calibration.kept)

    @classmethod
    def parameters_per_width(cls, weights: AttentionWeights) -> int:
        """Count a query row, and a key row divided by the number of heads that share it."""
        return weights.query.shape[-1] + weights.key.shape[-1] * len(weights.key) // weights.num_heads

    @cached_property
    def grams(self) -> Tensor:
        """Return the Gram matrices of the pairs of every key head: [H_k, P, P]; without calls, from the weights."""
        if not self.calls:
            return grams_by_weights(self.weights)
        if "grams" not in self.kept:
            self.kept["grams"] = pair_grams(self.weights, self.calls)
        return self.kept["grams"]

    def decompose(self, dim: int, options: FitOptions) -> Decomposition:
        """Keep the rows of the chosen pairs of every key head, queries scaled by `factors_of`; all at full width."""
        if dim == self.weights.dim_query_key:
            return Decomposition(self.query.flatten(0, 1), self.key.flatten(0, 1), None, 0.0)
        pairs = choose_pairs(self.grams, dim // self.weights.num_heads // 2)
        groups = groups_of(self.weights)
        factors = factors_of(self.grams, pairs)
        query, key = rows_of(self.query, pairs[groups]), rows_of(self.key, pairs)
        query = query * factors[groups].repeat(1, 2).reshape(-1, 1)  # both rows of a pair
        return Decomposition(query, key, None, share_lost(self.grams, pairs, factors), pairs=pairs)

    def square(self, query: Tensor, key: Tensor) -> Tensor:
        """Return ||T||^2 on average over all distances between two tokens."""
        query, key = in_pairs(query), in_pairs(key)[groups_of(self.weights)]
        return agreement(query, key, query, key)

    def overlap_and_square(
        self, query_key: RotaryQueryKey, left: Tensor, right: Tensor, query: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute both for the pairs that are kept, on average over all distances between two tokens."""
        groups, pairs = groups_of(self.weights), query_key.pairs
        left = in_pairs(left.unflatten(0, (len(query), -1)))
        right = in_pairs(right.unflatten(0, (len(key), -1)))[groups]
        if pairs is not None:
            query = rows_of(query, pairs[groups]).unflatten(0, (len(query), -1))
            key = rows_of(key, pairs).unflatten(0, (len(key), -1))
        return agreement(left, right, in_pairs(query), in_pairs(key)[groups]), agreement(left, right, left, right)

    def copy_rest(self, query_key: RotaryQueryKey, decomposition: Decomposition) -> None:
        """Copy the pairs and the biases of their rows; the query bias is the last column of the query."""
        pairs, bias = decomposition.pairs, self.weights.key_bias
        if query_key.pairs is not None:
            query_key.pairs.copy_(cast(Tensor, pairs))
        if query_key.shared_query.bias is not None:
            query_key.shared_query.bias.copy_(decomposition.query[:, -1])
        if query_key.shared_key.bias is not None and bias is not None:
            query_key.shared_key.bias.copy_(bias.flatten() if pairs is None else rows_of(bias, pairs))


FITS: Mapping[QueryKeyKind, type[SiteFit[Any]]] = {"shared": SharedFit, "per_head": PerHeadFit, "rotary": RotaryFit}


def kind_for(adapter: AttentionAdapter, asked: QueryKeyKind) -> QueryKeyKind:
    """Return the kind that sites of a family get for a requested one: separate heads are of the family's exact kind."""
    return adapter.exact_kind if asked in DIVIDED else asked


def check_kind(kind: QueryKeyKind, **options: tuple[object, object]) -> None:
    """Check that users may request a kind, and that it supports the options that differ from their defaults.

    Args:
        kind: the argument `kind` of the user.
        **options: name -> (value, default).

    Raises:
        ArgumentError: if there is no such kind, or an option has no meaning for it.
    """
    check_choice("kind", kind, [name for name, fit in FITS.items() if fit.is_offered])
    for name, (value, default) in options.items():
        why = FITS[kind].meaningless.get(name)
        if why is not None and value != default:
            raise ArgumentError(f"{name}={value!r} has no meaning for kind={kind!r}, {why}")
