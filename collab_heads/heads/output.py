"""Where gates live: between the concatenated heads and W_O.

Shapes: H heads, d_v width of a value head, D width of the model.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from collab_heads.config import GateState
from collab_heads.heads.gates import HeadGates


class HeadOutputProjection(nn.Module):
    """The output projection of a site, with gates on its heads: W_O Concat(g_h * head_h) + b.

    A family's output Linear becomes one in place (`install_gates`) and keeps the names of its weights, so no attention
    forward is written again. It is deliberately no `nn.Linear`: whatever treats it as one (LoRA, quantisation) would
    see ungated heads or lose the gates, and refuses or skips it this way.

    Parameters: `weight` [D, H * d_v], `bias` [D] or None, `gates.log_alpha` [H] (or the buffer `gates.alive`).
    """

    def forward(self, concatenated: Tensor) -> Tensor:
        """[..., H * d_v] -> [..., D]."""
        heads = concatenated.unflatten(-1, (self.gates.num_heads, -1))
        gated = heads * self.gates().to(heads.dtype).unsqueeze(-1)
        return F.linear(gated.flatten(-2), self.weight, self.bias)

    @torch.no_grad()
    def folded_weight(self) -> Tensor:
        """W_O with the gates of evaluation multiplied in: [D, H * d_v]."""
        heads = self.weight.detach().unflatten(-1, (self.gates.num_heads, -1))
        return (heads * self.gates.values().to(heads.dtype).unsqueeze(-1)).flatten(-2)

    def extra_repr(self) -> str:
        """PEFT quotes this where it refuses to adapt the module."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, gated heads: an adapter beside it "
            "would see them ungated; call collab_heads.prune_heads or fold_heads first, or leave this module out of "
            "target_modules"
        )


class ConstantOutput(nn.Module):
    """The output projection of a site without heads: its bias, or zero.

    Parameters: `bias` [D] where the Linear had one.
    """

    def forward(self, concatenated: Tensor) -> Tensor:
        """[..., 0] -> [..., D]."""
        if self.bias is None:
            return concatenated.new_zeros(*concatenated.shape[:-1], self.out_features)
        return self.bias.to(concatenated.dtype).expand(*concatenated.shape[:-1], -1)

    def extra_repr(self) -> str:
        """All heads are gone."""
        return f"out_features={self.out_features}, no heads"


def install_gates(projection: nn.Linear, state: GateState, num_heads: int) -> HeadGates:
    """Turn a plain output Linear into a `HeadOutputProjection` with open gates, in place: hooks and names survive."""
    gates = HeadGates(state, num_heads).to(projection.weight.device, projection.weight.dtype)
    gates.train(projection.training)
    projection.__class__ = HeadOutputProjection
    projection.gates = gates
    return gates


@torch.no_grad()
def remove_gates(projection: HeadOutputProjection) -> None:
    """Multiply the gates of evaluation into W_O and turn the module back into a plain Linear, in place."""
    projection.weight.copy_(projection.folded_weight())
    del projection.gates
    projection.__class__ = nn.Linear


@torch.no_grad()
def keep_output_heads(projection: nn.Module, kept: list[int], num_heads: int) -> None:
    """Leave only the columns (and gates) of the kept heads, in place; without any, the bias alone."""
    if isinstance(projection, HeadOutputProjection):
        projection.gates.keep_heads(kept)
    if not kept:
        projection.in_features = 0
        for name in ("weight", "gates"):
            if hasattr(projection, name):
                delattr(projection, name)
        projection.__class__ = ConstantOutput
        return
    columns = projection.weight.unflatten(-1, (num_heads, -1))[:, kept].flatten(-2)
    projection.weight = nn.Parameter(columns.clone(), projection.weight.requires_grad)
    projection.in_features = columns.shape[-1]


def dense_weight(projection: nn.Module) -> Tensor:
    """The weight that an output projection applies in evaluation, gates included: [D, H * d_v]."""
    return projection.folded_weight() if isinstance(projection, HeadOutputProjection) else projection.weight.detach()
