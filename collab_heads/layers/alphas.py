"""Alpha matrices: heads as linear combinations of heads.

Z'_i = sum_j alpha_ij Z_j over the heads of a site, before W_O. Combining heads is linear, and so is W_O. So there are
two ways to compute it: combine the heads of every token, which is cheap for few tokens, as in generation; or combine
the columns of W_O, W_O (alpha x I), whose cost does not depend on the number of tokens. `HeadOutputProjection` chooses.

H is the number of heads, d_v the width of a value head, D the width of the model.

Source: Azov and Landau 2020 (MHR-NLP-Transformers), "alphas".
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn


class HeadAlphas(nn.Module):
    """The alpha matrix of one site; it starts as the identity, which changes no bit of the output.

    Parameters: `alpha` [H, H]; row i makes the new head i.
    """

    def __init__(self, num_heads: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.eye(num_heads))

    @property
    def num_heads(self) -> int:
        return len(self.alpha)

    def forward(self, tensor: Tensor, *, of_heads: bool = False) -> Tensor:
        """Combine the columns of W_O, W_O -> W_O (alpha x I): [D, H * d_v]; with `of_heads` combine heads, see `heads`.

        Computed at least in float32; the result has the dtype of `tensor`.
        """
        return self.combined(self.alpha if of_heads else self.alpha.mT, tensor)

    def heads(self, concatenated: Tensor) -> Tensor:
        """Combine heads, Z -> Z': [..., H * d_v].

        Computed at least in float32; the result has the dtype of `concatenated`.
        """
        return self(concatenated, of_heads=True)  # a call, so that hooks that bring the alphas in are called, too

    def combined(self, matrix: Tensor, tensor: Tensor) -> Tensor:
        """Combine the H parts of the last dimension by a matrix [H, H]."""
        device = tensor.device.type
        precise = torch.promote_types(tensor.dtype, torch.float32)  # half precision would lose what alphas learn
        # the meta device has no autocast to turn off
        with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
            parts = tensor.to(precise).unflatten(-1, (self.num_heads, -1))
            return (matrix.to(tensor.device, precise) @ parts).flatten(-2).to(tensor.dtype)

    @torch.no_grad()
    def reset(self, num_heads: int | None = None) -> None:
        """Set the matrix to the identity again, of `num_heads` heads if given, in place."""
        if num_heads is not None and num_heads != self.num_heads:
            self.alpha = nn.Parameter(self.alpha.new_empty(num_heads, num_heads), self.alpha.requires_grad)
        self.alpha.copy_(torch.eye(self.num_heads))
