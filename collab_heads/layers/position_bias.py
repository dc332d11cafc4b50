"""Position biases that one module makes for all heads of all layers: a site with fewer heads uses its columns."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def note_kept_heads(module: Any, kept: Sequence[int]) -> None:
    """Note in `kept_heads` which columns of the position bias belong to the heads of an attention module.

    Args:
        module: stock or with fewer heads already.
        kept: indices among the heads that it has now.
    """
    before = getattr(module, "kept_heads", None)
    module.kept_heads = [before[head] for head in kept] if before else list(kept)


def kept_columns(module: Any, position_bias: Tensor | None) -> Tensor | None:
    """Select the columns of the heads that are left: [B or 1, all heads, T, S] -> [B or 1, H, T, S]; None for None."""
    kept = getattr(module, "kept_heads", None)
    if position_bias is None or not kept:  # all heads, or a site without any, which does not look
        return position_bias
    return torch.stack([position_bias[:, head] for head in kept], dim=1)
