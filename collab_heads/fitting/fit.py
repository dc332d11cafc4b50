"""Fit a query/key projection to a site: the part that all kinds have in common; the kinds are in `kinds`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor

from collab_heads.base.checks import check_count, check_seed
from collab_heads.base.numerics import float64
from collab_heads.calibration.calibrate import SiteCalibration
from collab_heads.contract.adapter import Capability
from collab_heads.errors import ArgumentError
from collab_heads.fitting.decompose import Decomposition, apply_root, input_root
from collab_heads.fitting.solvers import Method, check_method, squared_norm
from collab_heads.layers.query_key import QueryKey
from collab_heads.layers.query_key_kinds import build_query_key
from collab_heads.sites.site import AttentionWeights
from collab_heads.sites.state import QueryKeyState

# Share of the mean input variance that is added to every direction, so that none the calibration missed is lost.
RIDGE = 1e-4
# Share of the mean square of the keys that is added to their moments around the mean. Where all keys are alike (one
# token) these are rounding errors, 1e-14 of the squares for float32 inputs; all directions then weigh the same.
FLOOR = 1e-10

Projection = TypeVar("Projection", bound=QueryKey)


@dataclass(frozen=True)
class FitOptions:
    """The options of a fit: arguments of `swap_to_collaborative`, whose signature has the defaults that users get.

    Raises:
        ArgumentError: on a value that cannot work.
        MissingPackageError: if the method needs a package that is not installed.
    """

    method: Method = "als"
    tol: float = 1e-4
    refine_steps: int = 0
    seed: int = 0

    def __post_init__(self):
        check_method(self.method)
        if isinstance(self.tol, bool) or not isinstance(self.tol, int | float) or not 0 <= self.tol < 1:
            raise ArgumentError(f"tol {self.tol!r} must be a number from 0 to 1")
        check_count("refine_steps", self.refine_steps)
        check_seed(self.seed)


class SiteFit(ABC, Generic[Projection]):
    """The fit of one kind of query/key projection to one site.

    A kind is a subclass: it defines the widths that are possible, and how the weights of a site become a projection. An
    instance holds those weights in float64, and the roots of the input moments that weight the error.

    Attributes:
        meaningless: options that have no meaning for the kind -> the reason, as the end of a sentence.
        width_rule: how widths are rounded up, for the report; empty if any width is possible.
        cache_rule: why and when it caches more than the original, for the report; empty if it never does.
        is_offered: whether users may request the kind; if not, only families that support no other kind get it.
        capability: the capability that a family needs for a narrower projection of the kind.
        needs_calls: whether a decomposition that is not exact uses recorded calls.
        decomposes_bias: whether the query bias is decomposed, too, as a last column of the query.
        weights: the weights of the stock site.
        query: [H, d_k, D_q], or [H, d_k, D_q + 1] with the bias.
        key: [H, d_k, D_k].
        query_root, key_root: lower-triangular roots of the input moments; None without calibration.
    """

    meaningless: ClassVar[Mapping[str, str]] = {}
    width_rule: ClassVar[str] = ""
    cache_rule: ClassVar[str] = ""
    is_offered: ClassVar[bool] = True
    capability: ClassVar[Capability] = "collaborative"
    needs_calls: ClassVar[bool] = False
    decomposes_bias: ClassVar[bool] = False

    @torch.no_grad()
    def __init__(self, weights: AttentionWeights, calibration: SiteCalibration | None = None):
        self.weights = weights
        self.query, self.key = float64(weights.query.detach()), float64(weights.key.detach())
        has_bias_column = self.decomposes_bias and weights.query_bias is not None
        if has_bias_column:
            bias = float64(cast(Tensor, weights.query_bias).detach())
            self.query = torch.cat([self.query, bias[..., None]], dim=-1)
        self.query_root: Tensor | None = None
        self.key_root: Tensor | None = None
        if calibration is not None:
            moments = calibration.query.augmented() if has_bias_column else calibration.query.second()
            self.query_root = input_root(moments, RIDGE)
            # what is constant over the keys of a sequence cancels in the softmax
            floor = FLOOR * calibration.key.second().diagonal().mean()
            self.key_root = input_root(calibration.key.centred(), RIDGE, floor)

    @classmethod
    def possible_width(cls, asked: int, weights: AttentionWeights) -> int:
        """Return the width that the kind uses if `asked` (1 to H * d_k) is requested."""
        return asked

    @classmethod
    def width_unit(cls, dim: int, weights: AttentionWeights) -> int:
        """Return the step by which the width of a site planned at `dim` can change."""
        return 1

    @classmethod
    def parameters_per_width(cls, weights: AttentionWeights) -> int:
        """Return the number of parameters per dimension of R."""
        return weights.query.shape[-1] + weights.key.shape[-1]

    @abstractmethod
    def decompose(self, dim: int, options: FitOptions) -> Decomposition:
        """Decompose the weights to a width R that the kind can have."""

    def square(self, query: Tensor, key: Tensor) -> Tensor:
        """Return ||T||^2 of the weighted slices of the stock site, in the norm of `overlap_and_square`."""
        return squared_norm(query, key)

    @abstractmethod
    def overlap_and_square(
        self, query_key: Projection, left: Tensor, right: Tensor, query: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return <T', T> and ||T'||^2, differentiable, of the slices T[h] = query[h]^T key[h] and a projection's T'.

        Args:
            query_key: the projection.
            left: [R, D_q], its weighted query rows, with the bias as a last column if it has one.
            right: [R, D_k], its weighted key rows.
            query: [H, d_k, D_q], weighted.
            key: [H, d_k, D_k], weighted.
        """

    def copy_rest(self, query_key: Projection, decomposition: Decomposition) -> None:
        """Copy everything in a decomposition but the weights of the query and the key, in place."""

    def score_error(self, dtype: torch.dtype) -> Callable[[Projection], Tensor]:
        """Return a function that computes the squared relative score error of a projection, differentiable."""
        query, key = apply_root(self.query, self.query_root), apply_root(self.key, self.key_root)
        total = self.square(query, key)
        query, key, total = query.to(dtype), key.to(dtype), total.to(dtype)
        query_root, key_root = (None if r is None else r.to(dtype) for r in (self.query_root, self.key_root))

        def error(query_key: Projection) -> Tensor:
            left, right = query_key.shared_query.weight, query_key.shared_key.weight
            if query_key.shared_query.bias is not None:
                left = torch.cat([left, query_key.shared_query.bias[:, None]], dim=1)
            left = left if query_root is None else left @ query_root
            right = right if key_root is None else right @ key_root
            overlap, square = self.overlap_and_square(query_key, left, right, query, key)
            return (total - 2 * overlap + square) / total

        return error

    @torch.no_grad()
    def projection(self, state: QueryKeyState, decomposition: Decomposition) -> Projection:
        """Build the projection that a decomposition describes, in float64."""
        dims = self.weights.query.shape[-1], self.weights.key.shape[-1]
        device = decomposition.query.device
        built = build_query_key(state, self.weights.num_heads, *dims, device=device, dtype=torch.float64)
        query_key = cast(Projection, built)
        query_key.shared_query.weight.copy_(decomposition.query[:, : dims[0]])
        query_key.shared_key.weight.copy_(decomposition.key)
        self.copy_rest(query_key, decomposition)
        return query_key
