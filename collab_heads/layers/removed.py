"""Remove heads from Linears, and stand-ins for projections where no heads or neurons are left."""

from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from collab_heads.layers.layout import become, is_transposed, set_weight, weight_of

# Before torch 2.7 an export cannot be told from a compilation.
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


class NoHeads(nn.Module):
    """The query/key projection of a site without heads: it computes nothing and caches one zero per token.

    A cache counts tokens by its keys. Without the zero a first decoder layer would report length 0, and positions
    would be wrong; greedy tokens hide that, stepwise logits show it.
    """

    num_heads = 0
    cache_width = 1

    def keys(self, states: Tensor) -> Tensor:
        """Return zeros: [B, S, D] -> [B, S, 1]."""
        return states.new_zeros(*states.shape[:-1], 1)


class NoValues:
    """The value projection of a site without heads.

    It is not a module, so that code which looks for modules by name skips it: PEFT's default LoRA adapts every `value`.
    """

    out_features = 0

    def __call__(self, states: Tensor) -> Tensor:
        """Return no columns: [B, S, D] -> [B, S, 0]."""
        return states[..., :0]

    def parameters(self) -> tuple:
        return ()


class EmptyProjection(nn.Module):
    """A projection of a feed-forward block without neurons: the first ones put out nothing, the last one its bias.

    It is no `nn.Linear`, so that quantisation and LoRA on all Linears skip it: most of them cannot handle a weight
    without elements. A Conv1D cannot run without inputs either. The weight stays, since families read it (T5) or
    initialise it (GPT-2); it is not trained, since some optimizers and norms fail on it.

    Parameters: `weight` [0, D] or [D, 0], as the family stores it, `bias` or None.

    Attributes:
        in_features, out_features: the widths, one of which is 0.
        stores_transposed: whether `weight` is stored as in a Conv1D.
        stock: the class that it stands for.
        was_trained: whether the weight had `requires_grad`.
    """

    stores_transposed: ClassVar[bool] = False
    stock: ClassVar[type[nn.Module]] = nn.Linear
    weight: nn.Parameter
    bias: nn.Parameter | None
    in_features: int
    out_features: int
    was_trained: bool

    def forward(self, states: Tensor) -> Tensor:
        """Return no columns, or the bias: [..., D] -> [..., 0], or [..., 0] -> [..., D]."""
        if is_exporting():
            return constant(states, self.out_features, self.bias)
        return F.linear(states, weight_of(self), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, no neurons"


class TransposedEmptyProjection(EmptyProjection):
    """An `EmptyProjection` in place of a Conv1D."""

    stores_transposed = True
    stock = Conv1D


def empty_projection(module: nn.Module) -> None:
    """Turn a projection whose weight has no elements into an `EmptyProjection`, in place."""
    become(module, TransposedEmptyProjection if is_transposed(module) else EmptyProjection)
    empty = cast(EmptyProjection, module)
    empty.was_trained = empty.weight.requires_grad
    for parameter in empty.parameters():
        parameter.requires_grad_(parameter.requires_grad and parameter.numel() > 0)


def filled_projection(module: EmptyProjection) -> None:
    """Undo `empty_projection`, in place."""
    trains = module.was_trained
    delattr(module, "was_trained")
    become(module, module.stock)
    for parameter in module.parameters():
        if not parameter.numel():
            parameter.requires_grad_(trains)


def is_exporting() -> bool:
    """Return True while a graph for inputs of any size is made, which must not depend on sizes."""
    return _is_exporting() or torch.jit.is_tracing()


def constant(states: Tensor, width: int, bias: Tensor | None) -> Tensor:
    """Return the bias, or zeros, for every token: [..., any] -> [..., width].

    A Linear without columns computes the same, but not in all engines: OpenVINO then puts out other numbers.
    """
    zeros = states.new_zeros(*states.shape[:-1], width)
    return zeros if bias is None or not width else zeros + bias.to(states.dtype)


def is_empty(module: nn.Module) -> bool:
    return isinstance(getattr(module, "query_key", None), NoHeads)


def kept_parameter(old: Tensor, kept: Tensor) -> nn.Parameter:
    """Return a part of a parameter as a new one, with its own memory and the same `requires_grad`."""
    return nn.Parameter(kept.clone(), old.requires_grad)


@torch.no_grad()
def keep_rows(linear: nn.Module, kept: list[int], num_heads: int) -> None:
    """Keep only the rows of these heads in a projection [H * d, D] and its bias, in place."""
    weight, bias = weight_of(linear), cast(Tensor | None, linear.bias)
    set_weight(linear, rows_of(weight, kept, num_heads), requires_grad=weight.requires_grad)
    if bias is not None:
        linear.bias = kept_parameter(bias, rows_of(bias, kept, num_heads))


def rows_of(tensor: Tensor, kept: list[int], num_heads: int) -> Tensor:
    """Select the rows of some heads: [H * d, ...] -> [kept * d, ...], a copy."""
    return tensor.unflatten(0, (num_heads, -1))[kept].flatten(0, 1)
