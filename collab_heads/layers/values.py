"""Narrower values: the value projection of a site and the columns of W_O that read it, in another basis per head.

A head adds W_O[h] z_h to the output of its site, z_h = what its weights make of its values. With fewer value rows
A[h] W_V[h] and columns B[h], B[h] A[h] ~ W_O[h], it adds nearly the same and caches less; the names stay.

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
    """The values of a site and what reads them; gates stay where they are, alphas are multiplied in.

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
    """The weights of a value projection and of the output projection behind it."""
    weight = weight_of(output)
    if isinstance(output, HeadOutputProjection) and output.mixing is not None:
        weight = output.mixing(weight.cpu()).to(weight.device)
    biases = [None if bias is None else bias.detach() for bias in (value.bias, cast(Tensor | None, output.bias))]
    return ValueWeights(value.weight.detach(), biases[0], weight.detach(), biases[1])


@torch.no_grad()
def write_values(value: Projection, output: nn.Module, weights: ValueWeights) -> None:
    """Put other weights in place, of any width; alphas, which they hold, become an identity again.

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
    """Leave the leading rows of every value head, and the columns of W_O that read them: how a new model begins.

    Args:
        value: the value projection of a site.
        output: the output projection behind it.
        before: d_v, the width that value heads have.
        after: the width that is left.
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
    """[heads * before, ...] -> [heads * after, ...]."""
    return rows.unflatten(0, (-1, before))[:, :after].flatten(0, 1)
