"""Refine a decomposed site so that it reproduces its stock output on the calibration batches.

The decomposition minimises the error of scores under second moments, as if queries and keys were independent and all
keys equally important. Neither is true. A hundred Adam steps on the site's recorded inputs, a few sentences each,
towards the output of its stock weights close most of the gap. This needs no labels and no gradient through the rest of
the model: every site is fitted alone.

The score error of the decomposition stays in the loss as a penalty. It represents all pairs of tokens that the
calibration could have shown, and prevents overfitting to the few that it did show.

Scores grow with the square of the length of a text, and a gradient needs several tensors of that size: the scores of a
30-second clip in Whisper base take 72 MB, those of 2,048 tokens in a model with 32 heads 512 MB. Above `SCORES_BYTES`
they are computed one block of query tokens at a time, and the gradient of a block is computed before the next block. On
a processor blocks are small: they stay in its cache, and what allocators keep of them is small, too.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from collab_heads.layers.query_key import QueryKey, products, split_heads
from collab_heads.layers.query_key_kinds import EXACT_KIND, exact_query_key
from collab_heads.running.attention_calls import Call
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


SCORES_BYTES = {"cpu": 2 * 2**20}  # of scores that are held at a time, by the type of the device
SCORES_BYTES_ELSEWHERE = 32 * 2**20  # small blocks would leave most of a GPU idle


class Block(NamedTuple):
    """The attention of some query tokens.

    Attributes:
        rows: the query tokens.
        weights: [B, H, t, S], their attention weights.
        heads: [B, H, t, d_v], the outputs of the heads for them.
    """

    rows: slice
    weights: Tensor
    heads: Tensor


def blocks(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None) -> Iterator[Block]:
    """Compute softmax attention one block of query tokens at a time; callers turn gradients off.

    Args:
        query: [B, H, T, w], of every head.
        key: [B, H, S, w], or [B, 1, S, w] if all heads share one.
        value: [B, H, S, d_v], of every head.
        scale: scale of the scores.
        bias: added to the scaled scores, broadcasts to [B, H, T, S]; None for nothing.
    """
    length, whole = query.shape[-2], query.shape[:-1].numel() * key.shape[-2] * query.element_size()
    limit = SCORES_BYTES.get(query.device.type, SCORES_BYTES_ELSEWHERE)
    size = length if whole <= limit else max(length * limit // whole, 1)
    for number in range(math.ceil(length / size)):
        rows = slice(number * size, (number + 1) * size)
        scores = products(query[..., rows, :], key).mul_(scale)
        if bias is not None:
            scores = scores.add_(bias if bias.ndim < 2 or bias.shape[-2] == 1 else bias[..., rows, :])
        weights = scores.softmax(-1)
        yield Block(rows, weights, weights @ value)


@torch.no_grad()
def attended(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Return the output of all heads, [B, H, T, d_v], without a gradient; for the arguments see `blocks`."""
    return torch.cat([block.heads for block in blocks(query, key, value, scale, bias)], dim=-2)


class SquaredGap(torch.autograd.Function):
    """The squared norm, after W_O, of the heads' output minus the target, with gradients for query and key.

    The gradients of a block are computed together with the block, so attention is neither kept nor computed again.
    """

    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        bias: Tensor | None,
        target: Tensor,
        used: Tensor | None,
        gram: Tensor,
    ) -> Tensor:
        """Compute the squared norm: -> [].

        Args:
            ctx: the context of autograd.
            query: see `blocks`.
            key: see `blocks`.
            value: see `blocks`.
            scale: see `blocks`.
            bias: see `blocks`.
            target: [B, T, H * d_v].
            used: [B, T] bool, the query tokens that count; None for all.
            gram: [H * d_v, H * d_v], W_O^T W_O.
        """
        total, (num_heads, key_heads) = query.new_zeros(()), (query.shape[1], key.shape[1])
        wanted = any(ctx.needs_input_grad[:2])
        query_gradient = torch.empty_like(query) if wanted else None
        key_gradient = torch.zeros_like(key, memory_format=torch.contiguous_format) if wanted else None
        for rows, weights, heads in blocks(query, key, value, scale, bias):
            gap = heads.transpose(1, 2).flatten(-2) - target[:, rows]  # (B, t, H * d_v)
            if used is not None:
                gap *= used[:, rows, None]
            product = gap @ gram
            total += torch.dot(gap.flatten(), product.flatten())
            if query_gradient is None or key_gradient is None:
                continue
            of_heads = product.mul_(2 * scale).unflatten(-1, (num_heads, -1)).transpose(1, 2)  # (B, H, t, d_v)
            of_scores = (of_heads @ value.mT).sub_((of_heads * heads).sum(-1, keepdim=True)).mul_(weights)
            some = query[..., rows, :]
            if key_heads == 1 < num_heads:  # all heads are rows of one product with the one key
                shape, of_scores, some = of_scores.shape[1:3], of_scores.flatten(1, 2), some.flatten(1, 2)
                query_gradient[..., rows, :] = (of_scores @ key[:, 0]).unflatten(1, shape)
                key_gradient[:, 0] += of_scores.mT @ some
            else:
                query_gradient[..., rows, :] = of_scores @ key
                key_gradient += of_scores.mT @ some
        ctx.save_for_backward(query_gradient, key_gradient)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor):
        """Return the gradients of query and key; the other arguments have none."""
        return *(gradient * each for each in ctx.saved_tensors), *[None] * 6
