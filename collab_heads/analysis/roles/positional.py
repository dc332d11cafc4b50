"""Positional heads: those that mostly look at one relative position."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collab_heads.analysis.measures.passes import Attention, Batch, Observer
from collab_heads.analysis.measures.statistics import RunningMean, first_and_later
from collab_heads.errors import CalibrationError, NonFiniteError
from collab_heads.sites.site import AttentionSite


@dataclass(frozen=True, eq=False)
class PositionalNumbers:
    """The positions at which the heads of a site look, relative to the query token.

    Attributes:
        offset: [H] int64, the offset (key position - query position) on which the largest weight falls most often.
        share: [H] float64, the share of the query tokens for which it does; those too near an end to look so far count,
            too.
        tokens: number of query tokens, summed over the layers of a module that serves several.
        first_token: [H] float64, the share of the query tokens after the first whose largest weight falls on the first.
        first_chance: the same share of a head that looks anywhere in the sentence with equal probability.
    """

    offset: Tensor
    share: Tensor
    tokens: int
    first_token: Tensor
    first_chance: float


class Positional(Observer):
    """An observer that counts the relative positions of the largest weights, and those on the first token.

    Only self-attention is measured. Memory: one number per head and relative position of the longest sentence.

    Attributes:
        counts: path -> [H, 2 L - 1] int64 on the CPU, for the offsets -(L-1) to L-1, with L tokens in the longest
            sentence.
        on_first: path -> the mean of looking at the first token (1 or 0), over the query tokens after it.
        chances: path -> the mean of 1 / (number of tokens that can be looked at), over the same tokens.
    """

    weights = True

    def __init__(self, roles: Collection[str] = ("enc-self", "dec-self")):
        self.roles = roles

    def begin(self, sites: Sequence[AttentionSite]) -> None:
        measured = [site for site in sites if site.role in self.roles]
        self.counts = {site.path: torch.zeros(site.num_heads, 1, dtype=torch.int64) for site in measured}
        self.on_first = {site.path: RunningMean() for site in measured}
        self.chances = {site.path: RunningMean() for site in measured}
        self.finite = {site.path: True for site in measured}

    def see_weights(self, site: AttentionSite, attention: Attention, batch: Batch) -> None:
        if site.path not in self.counts:
            return
        values, positions = attention.largest  # (B, H, T)
        heads, length = positions.shape[1:]
        # the same for padding on the left: offsets are differences
        offsets = positions - torch.arange(length, device=positions.device)
        counted = batch.counted(site, offsets.mT) + length - 1  # (N, H), from 0
        bins = counted + torch.arange(heads, device=counted.device) * (2 * length - 1)
        counts = torch.bincount(bins.flatten(), minlength=heads * (2 * length - 1)).view(heads, -1).cpu()
        self.counts[site.path] = add_centred(self.counts[site.path], counts)
        first, later = first_and_later(site, attention, batch)
        hits = batch.counted(site, (positions == first[:, None, None]).mT)  # (N, H)
        counts_later = batch.counted(site, later)
        self.on_first[site.path].add(hits[counts_later].double())
        visible = batch.counted(site, visible_tokens(site, attention, batch))
        self.chances[site.path].add(1 / visible[counts_later].double())
        if not torch.isfinite(values).all():  # rare: NaN may stand in padding
            self.finite[site.path] &= bool(torch.isfinite(batch.counted(site, values.mT)).all())

    def results(self) -> Mapping[str, PositionalNumbers]:
        """Return the most frequent offset of every head, with its share.

        Of equally frequent offsets the nearest is taken, and of two equally near ones the negative one.
        """
        numbers = {}
        for path, counts in self.counts.items():
            tokens = int(counts[0].sum())
            if not tokens:
                raise CalibrationError(
                    f"{path} saw no query token that counts: every one was padding or excluded, or no batch reached it"
                )
            if not self.finite[path]:
                raise NonFiniteError(f"{path}: attention weights are NaN or inf; look at its weights and inputs")
            middle = counts.shape[1] // 2
            order = sorted(range(-middle, middle + 1), key=lambda offset: (abs(offset), offset))
            nearest_first = counts[:, torch.tensor(order) + middle]
            best, most = first_largest(nearest_first)
            sinks = self.on_first[path].mean() if self.on_first[path].count else torch.zeros(len(counts)).double()
            chance = float(self.chances[path].mean()) if self.chances[path].count else 0.0
            numbers[path] = PositionalNumbers(torch.tensor(order)[best], most.double() / tokens, tokens, sinks, chance)
        return numbers


def visible_tokens(site: AttentionSite, attention: Attention, batch: Batch) -> Tensor:
    """Return how many tokens each query token can look at, [B, T]: all of the sentence, or those so far.

    Windows are not regarded.
    """
    size, _, length, _ = attention.weights.shape
    mask = batch.keys(site)
    keys = torch.ones(size, length, dtype=torch.int64) if mask is None else mask.long()
    keys = keys.to(attention.weights.device)
    counts = keys.cumsum(1) if site.role == "dec-self" else keys.sum(1, keepdim=True).expand(-1, length)
    return counts.clamp(min=1)


def add_centred(one: Tensor, other: Tensor) -> Tensor:
    """Add two tensors [H, odd] with their middle columns aligned."""
    wide, narrow = (one, other) if one.shape[1] >= other.shape[1] else (other, one)
    margin = (wide.shape[1] - narrow.shape[1]) // 2
    total = wide.clone()
    total[:, margin : margin + narrow.shape[1]] += narrow
    return total


def first_largest(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first column with the largest number of every row, and that number: both [H]."""
    most = counts.amax(1)
    # argmax over equal numbers promises no order, over 0 and 1 it gives the first 1
    return (counts == most[:, None]).int().argmax(1), most
