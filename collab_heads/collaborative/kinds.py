"""How each kind of query/key projection is fitted to a site: a class a kind, and the table of them.

A new kind is one class here, one file in `layers/` (named in `layers/query_key_kinds.py`) and one word in
`state.QueryKeyKind` (and in `state.DIVIDED` if every head has R / H dimensions). Nothing else in the package asks which
kind it has before it; `tests/test_kinds.py` sees to that.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from torch import Tensor

from collab_heads.checks import check_choice
from collab_heads.collaborative.decompose import Decomposition, decompose_per_head, decompose_shared
from collab_heads.collaborative.fit import FitOptions, SiteFit
from collab_heads.collaborative.solvers import squared_norm
from collab_heads.collaborative.widths import HEAD_MULTIPLE, rounded_up
from collab_heads.errors import ArgumentError
from collab_heads.layers.per_head_query_key import PerHeadQueryKey
from collab_heads.layers.rotary_query_key import RotaryQueryKey
from collab_heads.layers.shared_query_key import ALIGNMENT, SharedQueryKey, content_bias
from collab_heads.numerics import float64
from collab_heads.sites import AttentionWeights
from collab_heads.state import QueryKeyKind


class SharedFit(SiteFit[SharedQueryKey]):
    """Any width; all heads are decomposed together, and the query bias becomes the content bias, which is exact."""

    cache_rule = (
        "a shared key of nearly full width is stored beside the content bias; choose a smaller width, or per_head, if "
        "the cache matters"
    )

    @classmethod
    def width_unit(cls, dim: int, weights: AttentionWeights) -> int:
        """What kernels like, unless the site is narrower than that."""
        return min(ALIGNMENT, dim)

    @classmethod
    def parameters_per_width(cls, weights: AttentionWeights) -> int:
        """A query row, a key row, and a column of the mixing."""
        return super().parameters_per_width(weights) + weights.num_heads

    def decompose(self, dim: int, options: FitOptions) -> Decomposition:
        """R components that all heads mix."""
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
        """T'[h] = left^T diag(mixing_h) right."""
        heads, mixing = len(query), query_key.mixing
        overlaps = (left @ query.flatten(0, 1).mT) * (right @ key.flatten(0, 1).mT)  # (R, H * d_k)
        overlap = (overlaps.unflatten(1, (heads, -1)).sum(-1) * mixing.mT).sum()
        return overlap, ((mixing @ ((left @ left.mT) * (right @ right.mT))) * mixing).sum()

    def copy_rest(self, query_key: SharedQueryKey, decomposition: Decomposition) -> None:
        """The mixing, and the content bias of the stock weights."""
        query_key.mixing.copy_(cast(Tensor, decomposition.mixing))
        bias, key = self.weights.query_bias, self.weights.key
        if query_key.content_bias is not None and bias is not None:
            query_key.content_bias.weight.copy_(content_bias(float64(bias), float64(key)))


class PerHeadFit(SiteFit[PerHeadQueryKey]):
    """Widths that give every head a multiple of 4; every head is decomposed alone, its query bias along with it."""

    meaningless: ClassVar[Mapping[str, str]] = {
        "method": "which is a plain SVD per head",
        "mixing_init": "which does not mix",
    }
    width_rule = "per-head widths are multiples of 4"
    decomposes_bias = True

    @classmethod
    def possible_width(cls, asked: int, weights: AttentionWeights) -> int:
        """R / H rounded up to a multiple of 4, at most the original head width."""
        return rounded_up(asked, weights.num_heads, weights.dim_head)

    @classmethod
    def width_unit(cls, dim: int, weights: AttentionWeights) -> int:
        """4 for every head."""
        return weights.num_heads * HEAD_MULTIPLE

    def decompose(self, dim: int, options: FitOptions) -> Decomposition:
        """The best R / H components of each head."""
        width = dim // self.weights.num_heads
        return decompose_per_head(self.query, self.key, width, query_root=self.query_root, key_root=self.key_root)

    def overlap_and_square(
        self, query_key: PerHeadQueryKey, left: Tensor, right: Tensor, query: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """T'[h] = left[h]^T right[h]."""
        heads = len(query)
        left, right = left.unflatten(0, (heads, -1)), right.unflatten(0, (heads, -1))
        return ((left @ query.mT) * (right @ key.mT)).sum(), squared_norm(left, right)

    def copy_rest(self, query_key: PerHeadQueryKey, decomposition: Decomposition) -> None:
        """The query bias, the last column of the query."""
        if query_key.shared_query.bias is not None:
            query_key.shared_query.bias.copy_(decomposition.query[:, -1])


class RotaryFit(SiteFit[RotaryQueryKey]):
    """The width of the original alone: nothing is decomposed, since positions come after the projections."""

    is_offered = False

    @classmethod
    def possible_width(cls, asked: int, weights: AttentionWeights) -> int:
        """That of the original."""
        return weights.dim_query_key

    def decompose(self, dim: int, options: FitOptions) -> Decomposition:
        """The weights as they are."""
        return Decomposition(self.query.flatten(0, 1), self.key.flatten(0, 1), None, 0.0, 0)

    def overlap_and_square(
        self, query_key: RotaryQueryKey, left: Tensor, right: Tensor, query: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """T'[h] = left[h]^T right[g], with g the key head of h; of scores without positions."""
        groups = list(query_key.groups)
        left, right = left.unflatten(0, (len(query), -1)), right.unflatten(0, (len(key), -1))[groups]
        return ((left @ query.mT) * (right @ key[groups].mT)).sum(), squared_norm(left, right)

    def copy_rest(self, query_key: RotaryQueryKey, decomposition: Decomposition) -> None:
        """The biases."""
        query_key.initialize_from(self.weights)


FITS: Mapping[QueryKeyKind, type[SiteFit[Any]]] = {"shared": SharedFit, "per_head": PerHeadFit, "rotary": RotaryFit}


def check_kind(kind: QueryKeyKind, **options: tuple[object, object]) -> None:
    """Check a kind of query/key projection, and that options other than the default mean something for it.

    Args:
        kind: what the user passed as `mixing`.
        **options: name -> (value, default).

    Raises:
        ArgumentError: if there is no such kind, or an option has no meaning for it.
    """
    check_choice("mixing", kind, [name for name, fit in FITS.items() if fit.is_offered])
    for name, (value, default) in options.items():
        why = FITS[kind].meaningless.get(name)
        if why is not None and value != default:
            raise ArgumentError(f"{name}={value!r} has no meaning for mixing={kind!r}, {why}")
