"""The first token of a sequence, which heads look at that have nothing to look for: an attention sink."""

import torch
from torch import Tensor

from collab_heads.analysis.measures.passes import Attention, Batch
from collab_heads.sites import AttentionSite


def first_token(site: AttentionSite, attention: Attention, batch: Batch) -> Tensor:
    """How much the query tokens after the first look at it: [N, H].

    Source: Xiao, Tian, Chen, Han, Lewis 2023, arXiv:2309.17453, who named it.
    """
    first, later = first_and_later(site, attention, batch)
    index = first[:, None, None, None].expand(*attention.weights.shape[:3], 1)
    weights = attention.weights.gather(-1, index).squeeze(-1)  # (B, H, T)
    return batch.counted(site, weights.mT)[batch.counted(site, later)]


def first_and_later(site: AttentionSite, attention: Attention, batch: Batch) -> tuple[Tensor, Tensor]:
    """Where the sequences of a batch begin, and which of their tokens come later.

    Args:
        site: of self-attention.
        attention: its weights.
        batch: the batch under way.

    Returns:
        The index of the first token that is no padding, [B], and whether a token comes after it, [B, T] bool.
    """
    weights = attention.weights
    size, _, length, _ = weights.shape
    mask = batch.keys(site)
    if mask is None:
        first = torch.zeros(size, dtype=torch.long, device=weights.device)
    else:
        first = mask.to(weights.device).int().argmax(1)
    return first, torch.arange(length, device=weights.device) > first[:, None]
