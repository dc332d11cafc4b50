"""The output projection of a site with gates and alphas, which act between the concatenated heads and W_O.

Shapes: H heads, d_v width of a value head, D width of the model.
"""

from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from collab_heads.layers.alphas import HeadAlphas
from collab_heads.layers.gates import HeadGates
from collab_heads.layers.layout import become, is_transposed, set_weight, weight_of, write_weight
from collab_heads.layers.removed import constant, is_exporting
from collab_heads.sites.state import GateState

PARTS = ("gates", "mixing")  # attributes of the projection, in the order in which heads go through them


class HeadOutputProjection(nn.Module):
    """The output projection of a site, with gates on its heads, or alphas that mix them, or both.

    W_O Concat(Z'_1, ..., Z'_H) + b, where Z'_i = sum_j alpha_ij g_j Z_j. A family's output Linear is turned into this
    class in place (`install_gates`, `install_alphas`) and keeps the names of its weights, so no attention forward is
    rewritten. It is deliberately no `nn.Linear`: a tool that treats it as one (LoRA, quantisation) would use the heads
    before gates and alphas, or lose these. As it is, such tools refuse or skip it.

    Parameters: `weight` [D, H * d_v], as the family stores it, `bias` [D] or None, `gates.log_alpha` [H] (or the buffer
    `gates.alive`) if it has gates, `mixing.alpha` [H, H] if it has alphas. That attribute is called `mixing` because
    its name is stored in checkpoints; everywhere else "mixing" is the kind of query/key projection, or the matrix of
    the shared one.

    Attributes:
        gates: None without gates.
        mixing: the alphas; None without.
        in_features: H * d_v.
        out_features: D.
        stores_transposed: whether `weight` is stored as in a Conv1D, [H * d_v, D]; `layout.weight_of` returns [D, ...].
    """

    stores_transposed: ClassVar[bool] = False
    stock: ClassVar[type[nn.Module]] = nn.Linear
    weight: nn.Parameter
    bias: nn.Parameter | None
    gates: HeadGates | None
    mixing: HeadAlphas | None
    in_features: int
    out_features: int

    def forward(self, concatenated: Tensor) -> Tensor:
        """Apply gates, alphas and W_O: [..., H * d_v] -> [..., D]."""
        if self.gates is not None:
            heads = concatenated.unflatten(-1, (self.gates.num_heads, -1))
            concatenated = (heads * self.gates().to(heads.dtype).unsqueeze(-1)).flatten(-2)
        weight = weight_of(self)
        if self.mixing is not None:
            # the cheaper way for this number of tokens; an exported graph takes the one that is cheap for many
            if not is_exporting() and concatenated.shape[:-1].numel() < self.out_features:
                concatenated = self.mixing.heads(concatenated)
            else:
                weight = self.mixing(weight)
        return F.linear(concatenated, weight, self.bias)

    @torch.no_grad()
    def folded_weight(self) -> Tensor:
        """Return W_O multiplied by the alphas and by the gates of evaluation: [D, H * d_v]."""
        weight = weight_of(self).detach()
        if self.mixing is not None:  # for good, so not in a GPU's TF32
            weight = self.mixing(weight.cpu()).to(weight)
        if self.gates is None:
            return weight
        heads = weight.unflatten(-1, (self.gates.num_heads, -1))
        return (heads * self.gates.values().to(heads.dtype).unsqueeze(-1)).flatten(-2)

    def extra_repr(self) -> str:
        """Describe the module; PEFT quotes this text where it refuses to adapt it."""
        way_out = "prune_heads or fold_heads" if self.mixing is None else "fold_heads"  # alphas outlive removal
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, gated or mixed heads: an adapter "
            f"beside it would see them as they were before; call collab_heads.{way_out} first, or leave this module "
            "out of target_modules"
        )


class TransposedOutputProjection(HeadOutputProjection):
    """A `HeadOutputProjection` in place of a Conv1D: its weight stays transposed."""

    stores_transposed = True
    stock = Conv1D


class ConstantOutput(nn.Module):
    """The output projection of a site without heads: its bias, or zero.

    Parameters: `bias` [D] where the Linear had one.
    """

    bias: nn.Parameter | None
    in_features: int
    out_features: int

    def forward(self, concatenated: Tensor) -> Tensor:
        """Return the bias, or zeros: [..., 0] -> [..., D].

        Computed as by a Linear without columns, so that the modules before it get a gradient of zero.
        """
        if is_exporting():
            return constant(concatenated, self.out_features, self.bias)
        weight = concatenated.new_empty(self.out_features, 0)
        return F.linear(concatenated, weight, None if self.bias is None else self.bias.to(concatenated.dtype))

    def extra_repr(self) -> str:
        return f"out_features={self.out_features}, no heads"


def gates_of(projection: nn.Module) -> HeadGates | None:
    """Return the gates of an output projection, or None."""
    return projection.gates if isinstance(projection, HeadOutputProjection) else None


def alphas_of(projection: nn.Module) -> HeadAlphas | None:
    """Return the alphas of an output projection, or None."""
    return projection.mixing if isinstance(projection, HeadOutputProjection) else None


def install_gates(projection: nn.Module, state: GateState, num_heads: int) -> HeadGates:
    """Add open gates to an output projection, in place: its hooks and names stay."""
    gates = HeadGates(state, num_heads)
    install(projection, "gates", gates)
    return gates


def install_alphas(projection: nn.Module, num_heads: int) -> HeadAlphas:
    """Add alphas, an identity, to an output projection, in place: its hooks and names stay."""
    alphas = HeadAlphas(num_heads)
    install(projection, "mixing", alphas)
    return alphas


def install(projection: nn.Module, name: str, part: nn.Module) -> None:
    """Put a part into an output projection, plain or not, on its device and in its dtype, but at least in float32.

    In half precision the small steps of a training would be rounded away: next to 1 bfloat16 has no number for 200.
    """
    weight = cast(Tensor, projection.weight)
    part.to(weight.device, torch.promote_types(weight.dtype, torch.float32)).train(projection.training)
    if not isinstance(projection, HeadOutputProjection):
        become(projection, TransposedOutputProjection if is_transposed(projection) else HeadOutputProjection)
        for other in PARTS:
            projection.register_module(other, None)
    setattr(projection, name, part)


@torch.no_grad()
def fold_output(projection: HeadOutputProjection) -> None:
    """Multiply alphas and the gates of evaluation into W_O and restore the stock class, in place."""
    write_weight(projection, projection.folded_weight())
    for name in PARTS:
        delattr(projection, name)
    become(projection, projection.stock)


@torch.no_grad()
def remove_gates(projection: HeadOutputProjection) -> None:
    """Multiply gates and alphas into W_O and remove the gates, in place; the alphas become an identity."""
    alphas = projection.mixing
    fold_output(projection)
    if alphas is not None:
        alphas.reset()
        install(projection, "mixing", alphas)


@torch.no_grad()
def fold_alphas(projection: HeadOutputProjection) -> None:
    """Multiply the alphas, if there are any, into W_O, in place; they become an identity."""
    if projection.mixing is not None:
        write_weight(projection, projection.mixing(weight_of(projection).cpu()))
        projection.mixing.reset()


@torch.no_grad()
def keep_output_heads(projection: nn.Module, kept: list[int], num_heads: int) -> None:
    """Keep only the columns (and gates) of these heads, in place; without any head, only the bias.

    Alphas are multiplied into W_O first, since a removed head takes part in the others. Then they become an identity of
    the heads that are left, or are removed if fewer than two are left.
    """
    if not kept:
        for name in ("weight", *PARTS):
            if hasattr(projection, name):
                delattr(projection, name)
        become(projection, ConstantOutput)
        cast(ConstantOutput, projection).in_features = 0
        return
    if isinstance(projection, HeadOutputProjection):
        if projection.mixing is not None:
            fold_alphas(projection)
            projection.mixing.reset(len(kept))
            if len(kept) < 2:
                projection.mixing = None
        if projection.gates is not None:
            projection.gates.keep_heads(kept)
    weight = weight_of(projection)
    columns = weight.unflatten(-1, (num_heads, -1))[:, kept].flatten(-2)
    set_weight(projection, columns, requires_grad=weight.requires_grad)
    if isinstance(projection, HeadOutputProjection) and projection.gates is None and projection.mixing is None:
        fold_output(projection)


def dense_weight(projection: nn.Module) -> Tensor:
    """Return the weight that an output projection applies in evaluation: [D, H * d_v]."""
    if isinstance(projection, HeadOutputProjection):
        return projection.folded_weight()
    return weight_of(projection).detach()
