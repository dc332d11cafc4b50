"""Position biases that one module makes for all heads of all layers: a site with fewer heads uses their columns."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def note_kept_heads(module: Any, kept: Sequence[int]) -> None:
    """Note which columns of the position bias are left to an attention module, in `kept_heads`.

    Args:
        module: stock or with fewer heads already.
        kept: indices among the heads that it has now.
    """
    before = getattr(module, "kept_heads", None)
    module.kept_heads = [before[head] for head in kept] if before else list(kept)


def kept_columns(module: Any, position_bias: Tensor | None) -> Tensor | None:
    """[B or 1, all heads, T, S] -> [B or 1, H, T, S]: those of the heads that are left; None stays None."""
    kept = getattr(module, "kept_heads", None)
    if position_bias is None or not kept:  # all heads, or a site without any, which does not look
        return position_bias
    return torch.stack([position_bias[:, head] for head in kept], dim=1)
