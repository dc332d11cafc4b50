"""Narrower values: the value projection of a site and the columns of W_O that read it, in another basis per head.

A head adds W_O[h] z_h to the output of its site, where z_h is the weighted sum of its values. With fewer value rows
A[h] W_V[h] and columns B[h], where B[h] A[h] ~ W_O[h], it adds nearly the same and caches less; the names stay.

Shapes: H heads, d_v width of a value head, r that of a narrower one, D width of the model, D_k of the key-side inputs.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from collab_heads.layers.fused import Projection
from collab_heads.layers.layout import set_weight, weight_of
from collab_heads.layers.output import HeadOutputProjection
from collab_heads.layers.removed import kept_parameter


@dataclass(frozen=True)
class ValueWeights:
    """The weights of the value and output projections of a site; gates are not included, alphas are multiplied in.

    Attributes:
        value: [H * d_v, D_k].
        value_bias: [H * d_v], or None.
        output: [D, H * d_v].
        output_bias: [D], or None.
    """

    value: Tensor
    value_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None


@torch.no_grad()
def read_values(value: Projection, output: nn.Module) -> ValueWeights:
    """Return the weights of a value projection and of the output projection behind it."""
    weight = weight_of(output)
    if isinstance(output, HeadOutputProjection) and output.mixing is not None:
        weight = output.mixing(weight.cpu()).to(weight.device)
    biases = [None if bias is None else bias.detach() for bias in (value.bias, cast(Tensor | None, output.bias))]
    return ValueWeights(value.weight.detach(), biases[0], weight.detach(), biases[1])


@torch.no_grad()
def write_values(value: Projection, output: nn.Module, weights: ValueWeights) -> None:
    """Write other weights, of any width, in place; alphas, which are part of them, become an identity again.

    The values must come from a Linear of their own, as those of a collaborative site do.
    """
    changed: tuple[tuple[nn.Module, Tensor, Tensor | None], ...] = (
        (cast(nn.Linear, value), weights.value, weights.value_bias),
        (output, weights.output, weights.output_bias),
    )
    for module, weight, bias in changed:
        old, old_bias = weight_of(module), cast(Tensor | None, module.bias)
        set_weight(module, weight.to(old), requires_grad=old.requires_grad)
        if old_bias is not None and bias is not None:
            module.bias = kept_parameter(old_bias, bias.to(old_bias))
    if isinstance(output, HeadOutputProjection) and output.mixing is not None:
        output.mixing.reset()


@torch.no_grad()
def keep_value_rows(value: Projection, output: nn.Module, before: int, after: int) -> None:
    """Keep the leading rows of every value head, and the columns of W_O that read them: the start of a new model.

    Args:
        value: the value projection of a site.
        output: the output projection behind it.
        before: d_v, the width of the value heads.
        after: the width to keep.
    """
    weights = read_values(value, output)
    bias = weights.value_bias
    rows = ValueWeights(
        leading(weights.value, before, after),
        None if bias is None else leading(bias, before, after),
        leading(weights.output.mT, before, after).mT.contiguous(),
        weights.output_bias,
    )
    write_values(value, output, rows)


def leading(rows: Tensor, before: int, after: int) -> Tensor:
    """Keep the leading rows of every head: [heads * before, ...] -> [heads * after, ...]."""
    return rows.unflatten(0, (-1, before))[:, :after].flatten(0, 1)
