"""Narrower values: the value projection of a site and the columns of W_O that read it, in another basis per head.

A head adds W_O[h] z_h to the output of its site, z_h = what its weights make of its values. With fewer value rows
A[h] W_V[h] and columns B[h], B[h] A[h] ~ W_O[h], it adds nearly the same and caches less; the names stay.

Shapes: H heads, d_v width of a value head, r that of a narrower one, D width of the model, D_k of the key-side inputs.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

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
def read_values(value: nn.Linear, output: nn.Module) -> ValueWeights:
    """The weights of a value projection and of the output projection behind it."""
    weight = cast(nn.Linear, output).weight
    if isinstance(output, HeadOutputProjection) and output.mixing is not None:
        weight = output.mixing(weight.cpu()).to(weight.device)
    tensors = value.weight, value.bias, weight, cast(nn.Linear, output).bias
    return ValueWeights(*(None if tensor is None else tensor.detach() for tensor in tensors))


@torch.no_grad()
def write_values(value: nn.Linear, output: nn.Module, weights: ValueWeights) -> None:
    """Put other weights in place, of any width; alphas, which they hold, become an identity again."""
    linear = cast(nn.Linear, output)
    changed = (
        (value, "weight", weights.value),
        (value, "bias", weights.value_bias),
        (linear, "weight", weights.output),
        (linear, "bias", weights.output_bias),
    )
    for module, name, tensor in changed:
        old = getattr(module, name)
        if old is not None and tensor is not None:
            setattr(module, name, kept_parameter(old, tensor.to(old)))
    value.out_features, linear.in_features = value.weight.shape[0], linear.weight.shape[1]
    if isinstance(output, HeadOutputProjection) and output.mixing is not None:
        output.mixing.reset()


@torch.no_grad()
def keep_value_rows(value: nn.Linear, output: nn.Module, before: int, after: int) -> None:
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
