"""Refine a decomposed site so that it reproduces its stock output on the calibration batches.

The decomposition minimises the error of scores under second moments, as if queries and keys were independent and all
keys equally important. Neither is true. A hundred Adam steps on the site's recorded inputs, a few sentences each,
towards the output of its stock weights close most of the gap. This needs no labels and no gradient through the rest of
the model: every site is fitted alone.

The score error of the decomposition stays in the loss as a penalty. It represents all pairs of tokens that the
calibration could have shown, and prevents overfitting to the few that it did show.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collab_heads.collaborative.attended import SquaredGap, attended
from collab_heads.layers.query_key import QueryKey, split_heads
from collab_heads.layers.query_key_kinds import EXACT_KIND, exact_query_key
from collab_heads.model.attention_calls import Call
from collab_heads.sites.site import AttentionWeights
from collab_heads.sites.state import QueryKeyKind

# Adam's step per parameter, relative to the root mean square of its tensor
RELATIVE_RATE = 0.016
BETAS = 0.8, 0.98  # Adam's; over a hundred steps its defaults 0.9 and 0.999 would remember too much
PENALTY = 1.0  # weight of the squared relative score error
PENALTIES = 20  # times per fit that its gradient is computed: it changes slowly, and costs more than the rest of a step
# Query positions per step, or rows of a call if these are longer. Down to about these sizes, many small steps gain more
# per second than few large ones.
POSITIONS, ROWS = 160, 4


@dataclass(frozen=True)
class Refinement:
    """The relative error of a site's output on the calibration batches, before and after; None if not measured."""

    error_before: float | None
    error_after: float | None


@dataclass(frozen=True)
class Sample:
    """Some rows of a recorded call, with all that is needed to repeat it and to compare the result.

    Attributes:
        query_inputs, key_inputs: [B, T, D_q], [B, S, D_k].
        bias: added to the scores, broadcasts to [B, H, T, S]; None for nothing.
        value: [B, H, S, d_v].
        used: [B, T] bool, the query tokens that count; None for all.
        positions: cosines and sines of rotary positions; else None.
        target: [B, T, H * d_v], the outputs of the heads of the stock site.
    """

    query_inputs: Tensor
    key_inputs: Tensor
    bias: Tensor | None
    value: Tensor
    used: Tensor | None
    positions: tuple[Tensor, Tensor] | None
    target: Tensor

    def of_rows(self, rows: slice) -> "Sample":
        """Return the sample with only some rows of its batch."""

        def some(tensor: Tensor) -> Tensor:
            return tensor[rows] if len(tensor) > 1 else tensor

        return Sample(
            some(self.query_inputs),
            some(self.key_inputs),
            self.bias if self.bias is None or self.bias.ndim < 4 else some(self.bias),
            some(self.value),
            None if self.used is None else some(self.used),
            None if self.positions is None else (some(self.positions[0]), some(self.positions[1])),
            some(self.target),
        )


class OutputGap:
    """The gap between the output of a site with another query/key projection and that with its stock one.

    Only the outputs of the heads differ, so the distance after W_O is computed from them with the Gram matrix of W_O.

    Args:
        weights: the weights of the stock site.
        output: [D, H * d_v], W_O with gates and alphas.
        calls: recorded calls of the stock site.
        kind: the kind of the projection that holds its stock weights unchanged.
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
        self.samples: list[Sample] = []
        self.size = 0.0
        for call in calls:
            biases = [bias.to(dtype) for bias in call.biases]
            queries, keys = (  # outputs of an encoder that a batch brings may have a gradient, or be unfit for any
                inputs.detach().to(dtype, copy=inputs.is_inference()) for inputs in (call.query_inputs, call.key_inputs)
            )
            positions = None if call.positions is None else (call.positions[0].to(dtype), call.positions[1].to(dtype))
            bias = sum(biases[1:], biases[0]) if biases else None
            values = for_each_head(keys @ value.mT, weights)  # its bias adds the same whatever the scores are
            query, key = stock.meet(queries, keys, positions)
            target = attended(query, key, values, self.scale, bias).transpose(1, 2).flatten(-2)
            rows = target.flatten(0, 1) if call.used is None else target[call.used]
            self.size += float(self.square(rows - rows.mean(0)))
            self.samples += in_pieces(Sample(queries, keys, bias, values, call.used, positions, target))

    def square(self, rows: Tensor) -> Tensor:
        """Compute the squared norm after W_O of heads' outputs: [tokens, H * d_v] -> []."""
        return (rows * (rows @ self.gram)).sum()

    def squared_gap(self, query_key: QueryKey, index: int) -> Tensor:
        """Return the squared gap of one sample, relative to the mean square of a sample's output; differentiable."""
        sample = self.samples[index]
        query, key = query_key.meet(sample.query_inputs, sample.key_inputs, sample.positions)
        gap = SquaredGap.apply(query, key, sample.value, self.scale, sample.bias, sample.target, sample.used, self.gram)
        return gap * (len(self.samples) / max(self.size, 1e-30))

    @torch.no_grad()
    def error(self, query_key: QueryKey) -> float:
        """Return the relative error of the site's output over all calls."""
        squares = [float(self.squared_gap(query_key, index)) for index in range(len(self.samples))]
        return (sum(squares) / len(squares)) ** 0.5 if self.size else 0.0


def for_each_head(values: Tensor, weights: AttentionWeights) -> Tensor:
    """Split values into heads, and repeat those that heads share: [B, S, H_k * d_v] -> [B, H, S, d_v]."""
    split = split_heads(values, len(weights.value))
    return split if weights.groups is None else split[:, list(weights.groups)]


def in_pieces(sample: Sample) -> list[Sample]:
    """Cut the rows of a sample into views of about `POSITIONS` query positions, and at least `ROWS` rows, each."""
    count, length = sample.query_inputs.shape[:2]
    number = max(min(count * length // POSITIONS, count // ROWS), 1)
    bounds = [count * piece // number for piece in range(number + 1)]
    return [sample.of_rows(slice(start, stop)) for start, stop in itertools.pairwise(bounds)]


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
        gap: the gap to minimise.
        score_error: the squared relative score error of a projection, differentiable.
        steps: number of Adam steps, each on one sample.
        seed: seed of the order of the samples.

    Returns:
        The errors before and after. If the fit does not improve the output, the projection is not changed.
    """
    fitted = copy.deepcopy(query_key).to(dtype=gap.dtype).requires_grad_(True)
    before, parameters = gap.error(fitted), list(fitted.parameters())
    optimizer = torch.optim.Adam(
        [
            {"params": [parameter], "lr": RELATIVE_RATE * float(parameter.detach().square().mean().sqrt())}
            for parameter in parameters
        ],
        betas=BETAS,
        fused=True if parameters[0].is_cpu else None,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    with torch.enable_grad():
        for step in range(steps):
            if step % max(steps // PENALTIES, 1) == 0:
                pull = torch.autograd.grad(PENALTY * score_error(fitted), parameters, materialize_grads=True)
            order = order or torch.randperm(len(gap.samples), generator=generator).tolist()
            push = torch.autograd.grad(gap.squared_gap(fitted, order.pop()), parameters)
            for parameter, one, other in zip(parameters, pull, push, strict=True):
                parameter.grad = one + other
            optimizer.step()
            schedule.step()
    after = gap.error(fitted)
    if not after < before:
        return Refinement(before, before)
    query_key.load_state_dict(fitted.state_dict())
    return Refinement(before, after)
