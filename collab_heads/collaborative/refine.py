"""Refine a decomposed site on what it computes: its own output on the calibration batches.

The decomposition minimises the error of scores under second moments, as if queries and keys were independent and every
key mattered alike. Neither holds. A few dozen Adam steps on the site's recorded inputs, towards the output that its
stock weights give, close most of the gap. It needs no labels and no gradient through the rest of the model: every site
is fitted alone.

The score error of the decomposition stays in the loss as a penalty. It stands for all pairs of tokens that the
calibration could have shown, and keeps the fit from learning the few it did show.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collab_heads.collaborative.attended import attended
from collab_heads.layers.query_key import QueryKey, split_heads
from collab_heads.layers.query_key_kinds import EXACT_KIND, exact_query_key
from collab_heads.model.attention_calls import Call
from collab_heads.sites import AttentionWeights
from collab_heads.state import QueryKeyKind

RELATIVE_RATE = 0.02  # Adam's step per parameter, relative to the root mean square of its tensor
PENALTY = 1.0  # weight of the squared relative score error
PENALTY_EVERY = 2  # steps: it costs as much as the rest of a step


@dataclass(frozen=True)
class Refinement:
    """Relative error of a site's output on the calibration batches, before and after; None if not measured."""

    error_before: float | None
    error_after: float | None


@dataclass(frozen=True)
class Sample:
    """A recorded call, ready to be computed again.

    Attributes:
        query_inputs, key_inputs: [B, T, D_q], [B, S, D_k].
        bias: added to the scores, broadcasts to [B, H, T, S]; None for nothing.
        value: [B, H, S, d_v].
        used: [B, T] bool, or None for all.
        positions: cosines and sines, where positions are rotations; or None.
        heads: [tokens, H * d_v]: what the heads of the stock site give for the tokens that count.
    """

    query_inputs: Tensor
    key_inputs: Tensor
    bias: Tensor | None
    value: Tensor
    used: Tensor | None
    positions: tuple[Tensor, Tensor] | None
    heads: Tensor


class OutputGap:
    """How far the output of a site moves when another query/key projection replaces its stock one.

    Only the outputs of the heads differ, so the distance after W_O is computed from them with its Gram matrix.

    Args:
        weights: of the stock site.
        output: [D, H * d_v], W_O with gates and alphas.
        calls: recorded of the stock site.
        kind: of the projection that holds its stock weights.
    """

    @torch.no_grad()
    def __init__(
        self, weights: AttentionWeights, output: Tensor, calls: Sequence[Call], kind: QueryKeyKind = EXACT_KIND
    ):
        dtype = torch.float32 if output.dtype.itemsize < 4 else output.dtype
        self.dtype, self.scale = dtype, weights.scale
        output = output.to(dtype)
        self.gram = output.mT @ output  # (H * d_v, H * d_v)
        stock, value = exact_query_key(weights, kind).to(dtype=dtype), weights.value.flatten(0, 1).to(dtype)
        self.samples = []
        for call in calls:
            biases = [bias.to(dtype) for bias in call.biases]
            queries, keys = (  # outputs of an encoder that a batch brings may have a gradient, or be unfit for any
                inputs.detach().to(dtype, copy=inputs.is_inference()) for inputs in (call.query_inputs, call.key_inputs)
            )
            sample = Sample(
                queries,
                keys,
                sum(biases[1:], biases[0]) if biases else None,
                for_each_head(keys @ value.mT, weights),  # its bias adds the same whatever the scores are
                call.used,
                None if call.positions is None else (call.positions[0].to(dtype), call.positions[1].to(dtype)),
                heads=value.new_zeros(()),
            )
            self.samples.append(dataclasses.replace(sample, heads=self.heads(stock, sample)))
        self.size = sum(float(self.square(each.heads - each.heads.mean(0))) for each in self.samples)

    def heads(self, query_key: QueryKey, sample: Sample) -> Tensor:
        """What the heads give with a projection: [tokens, H * d_v]."""
        query, key = query_key.meet(sample.query_inputs, sample.key_inputs, sample.positions)
        heads = attended(query, key, sample.value, self.scale, sample.bias)
        heads = heads.transpose(1, 2).flatten(-2)  # (B, T, H * d_v)
        return heads.flatten(0, 1) if sample.used is None else heads[sample.used]

    def square(self, heads: Tensor) -> Tensor:
        """Squared norm after W_O of what heads give: [tokens, H * d_v] -> []."""
        return Quadratic.apply(heads, self.gram)

    def squared_gap(self, query_key: QueryKey, index: int) -> Tensor:
        """The squared gap in one recorded call, relative to the mean size of the output of a call."""
        sample = self.samples[index]
        return self.square(self.heads(query_key, sample) - sample.heads) * (len(self.samples) / max(self.size, 1e-30))

    @torch.no_grad()
    def error(self, query_key: QueryKey) -> float:
        """Relative error of the site's output over all calls."""
        squares = [float(self.squared_gap(query_key, index)) for index in range(len(self.samples))]
        return (sum(squares) / len(squares)) ** 0.5 if self.size else 0.0


def for_each_head(values: Tensor, weights: AttentionWeights) -> Tensor:
    """The values of every head of a site, which some may share: [B, S, H_k * d_v] -> [B, H, S, d_v]."""
    split = split_heads(values, len(weights.value))
    return split if weights.groups is None else split[:, list(weights.groups)]


class Quadratic(torch.autograd.Function):
    """The sum of x G x^T over rows x, with the product of the forward pass used again in the backward pass."""

    @staticmethod
    def forward(ctx, rows: Tensor, gram: Tensor) -> Tensor:
        """[N, D], [D, D] symmetric -> []."""
        product = rows @ gram
        ctx.save_for_backward(product)
        return (rows * product).sum()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        """2 x G."""
        (product,) = ctx.saved_tensors
        return 2 * gradient * product, None


def refine(
    query_key: QueryKey,
    gap: OutputGap,
    score_error: Callable[[QueryKey], Tensor],
    steps: int,
    seed: int,
) -> Refinement:
    """Fit a site's new query/key projection to the recorded calls, in place.

    Args:
        query_key: the projection, already decomposed, in float64; it is not part of the model yet.
        gap: what is made small.
        score_error: the squared relative score error of a projection, differentiable.
        steps: Adam steps; one recorded call each.
        seed: of the order of the calls.

    Returns:
        The errors before and after. If the fit made the output worse, the projection is left as it was.
    """
    fitted = copy.deepcopy(query_key).to(dtype=gap.dtype).requires_grad_(True)
    before = gap.error(fitted)
    parameters = [
        {"params": [parameter], "lr": RELATIVE_RATE * float(parameter.detach().square().mean().sqrt())}
        for parameter in fitted.parameters()
    ]
    optimizer = torch.optim.Adam(parameters)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    with torch.enable_grad():
        for step in range(steps):
            order = order or torch.randperm(len(gap.samples), generator=generator).tolist()
            loss = gap.squared_gap(fitted, order.pop())
            if step % PENALTY_EVERY == 0:
                loss = loss + PENALTY_EVERY * PENALTY * score_error(fitted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    after = gap.error(fitted)
    if not after < before:
        return Refinement(before, before)
    query_key.load_state_dict(fitted.state_dict())
    return Refinement(before, after)
