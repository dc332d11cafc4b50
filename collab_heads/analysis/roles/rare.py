"""Rare-token heads: those that mostly look at the rarest token of a sentence."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.analysis.measures.passes import Attention, Batch, Observer
from collab_heads.errors import ArgumentError, CalibrationError
from collab_heads.running.batches import as_bool, each_batch, reads_ids, sides
from collab_heads.sites.site import AttentionSite

NEVER = torch.iinfo(torch.int64).max  # the rank of tokens that are not candidates


def count_tokens(model: PreTrainedModel, batches: Iterable[Mapping]) -> Tensor | None:
    """Count how often each token occurs in a corpus, without padding.

    Args:
        model: the model whose tokens they are; it does not run.
        batches: input dicts as the model takes them. They are read once more: pass a list or a DataLoader, not a
            generator.

    Returns:
        [V] int64, for the ids of `input_ids`; None if the batches hold embeddings or images instead.

    Raises:
        ArgumentError: if `batches` can be read only once.
        CalibrationError: if there are no batches, one is not a dict or holds no ids in `input_ids`, a mask does not
            fit, or an id is unknown.
    """
    if isinstance(batches, Iterable) and iter(batches) is batches:
        raise ArgumentError(
            f"batches is a {type(batches).__name__} that can be read only once, and counting tokens takes a reading of "
            "its own: pass a list or a DataLoader, or token_counts=[V], how often every token is in your corpus"
        )
    counts = torch.zeros(vocabulary_size(model), dtype=torch.int64)
    for index, inputs in enumerate(each_batch(batches)):
        ids, mask = inputs.get("input_ids"), as_bool(inputs.get("attention_mask"))
        if ids is None:
            return None
        is_right = isinstance(ids, Tensor) and ids.ndim > 1 and not ids.is_floating_point() and ids.dtype != torch.bool
        if not is_right or (ids < 0).any():
            raise CalibrationError(f"batch {index}: input_ids must be a tensor of ids [B, T], whole numbers from 0")
        ids = ids.flatten(0, -2)
        if mask is not None and mask.shape != ids.shape:
            raise CalibrationError(
                f"batch {index}: the mask {tuple(mask.shape)} does not fit the ids {tuple(ids.shape)}"
            )
        in_batch = torch.bincount((ids.flatten() if mask is None else ids[mask]).cpu())
        if len(in_batch) > len(counts):
            raise CalibrationError(
                f"batch {index} holds the id {len(in_batch) - 1}; "
                f"the {type(model).__name__} has {len(counts)} embeddings"
            )
        counts[: len(in_batch)] += in_batch
    return counts


def vocabulary_size(model: PreTrainedModel) -> int:
    try:
        return cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    except NotImplementedError:  # of a model with a stack for texts and one for images
        return model.config.get_text_config().vocab_size


@dataclass(frozen=True, eq=False)
class RareNumbers:
    """The shares with which the heads of a site look at rare tokens.

    Attributes:
        rarest: [H] float64, share of query tokens whose largest weight falls on the rarest token of the sentence.
        two_rarest: [H] float64, the same for the two rarest tokens together.
        chance: (rarest, two rarest), the shares of a head that looks anywhere in the sentence with equal probability.
        tokens: number of query tokens, summed over the layers of a module that serves several.
        sentences: number of sentences with a query token.
    """

    rarest: Tensor
    two_rarest: Tensor
    chance: tuple[float, float]
    tokens: int
    sentences: int


class RareTokens(Observer):
    """An observer that counts how often the largest weight falls on the rarest token, or the two rarest.

    Tokens are compared within the sentence; in a decoder, within what the query token can see. Equally rare tokens
    count alike. Query tokens of a sentence without a candidate count as misses.

    Args:
        counts: [V], how often each token occurs in a corpus, see `count_tokens`.
        special: ids that are never the rarest, such as those that begin or end sentences. Padding never is.
        role: the role of the sites to measure, "enc-self" or "dec-self".
    """

    weights = True

    def __init__(self, counts: Tensor, special: Iterable[int] = (), role: str = "enc-self"):
        self.role, self.ranks = role, ranks_of(counts)
        for token in special:
            if 0 <= token < len(self.ranks):
                self.ranks[token] = NEVER
        self._batch: tuple[Batch, tuple[Tensor, Tensor, Tensor] | None] | None = None

    def begin(self, sites: Sequence[AttentionSite]) -> None:
        self.measured = {site.path: site for site in sites if site.role == self.role and reads_ids(site)}
        self.hits = {path: torch.zeros(2, site.num_heads, dtype=torch.int64) for path, site in self.measured.items()}
        self.chances = {path: torch.zeros(2, dtype=torch.float64) for path in self.measured}
        self.tokens, self.sentences = dict.fromkeys(self.measured, 0), 0
        self._batch = None

    def see_weights(self, site: AttentionSite, attention: Attention, batch: Batch) -> None:
        """Add a batch; one without token ids adds no query tokens."""
        if site.path not in self.measured:
            return
        if self._batch is None or self._batch[0] is not batch:
            self._batch = (batch, self.prepare(site, batch))
            counted = batch.queries(site)
            self.sentences += len(attention.weights) if counted is None else int(counted.any(1).sum())
        if self._batch[1] is None:
            return
        ranks, limits, chances = self._batch[1]
        positions = attention.largest[1]  # (B, H, T)
        reached = ranks[:, None].expand(-1, positions.shape[1], -1).gather(2, positions)  # (B, H, T)
        reached = batch.counted(site, reached.mT)  # (N, H)
        counted = batch.counted(site, limits.expand(-1, positions.shape[2], -1))  # (N, 2)
        self.hits[site.path] += (reached <= counted.mT[..., None]).sum(1).cpu()  # (2, N, H) -> (2, H)
        self.chances[site.path] += batch.counted(site, chances.expand(-1, positions.shape[2], -1)).sum(0).cpu()
        self.tokens[site.path] += len(reached)

    def prepare(self, site: AttentionSite, batch: Batch) -> tuple[Tensor, Tensor, Tensor] | None:
        """Prepare what all layers of a batch share.

        Returns:
            The rank of every key token, [B, S]; the highest rank that is a hit, for the rarest and for the two rarest,
            [B, T or 1, 2]; the share of visible tokens that are hits, of the same shape. None if there are no token
            ids.
        """
        ids, keys = batch.ids(sides(site)[0]), batch.keys(site)
        if ids is None:
            return None
        if int(ids.max()) >= len(self.ranks):
            raise ArgumentError(
                f"token_counts has {len(self.ranks)} numbers, but batch {batch.index} holds the id {int(ids.max())}"
            )
        visible = torch.ones_like(ids, dtype=torch.bool) if keys is None else keys.to(ids.device)
        ranks = self.ranks.to(ids.device)[ids].masked_fill(~visible, NEVER)
        visible = visible[:, None]  # (B, 1, S)
        if site.role == "dec-self":
            visible = visible & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        candidates = ranks[:, None].masked_fill(~visible, NEVER)  # (B, T or 1, S)
        lowest = candidates.topk(min(2, ids.shape[1]), dim=-1, largest=False, sorted=True).values
        first, second = lowest[..., 0], lowest[..., -1]
        second = torch.where(second == NEVER, first, second)
        limits = torch.stack([first, second], -1)
        limits = limits.masked_fill(limits == NEVER, -1)  # no candidate: nothing is a hit
        hits = (candidates[..., None] <= limits[:, :, None]).sum(2)
        return ranks, limits, hits.double() / visible.sum(-1, keepdim=True).clamp(min=1)

    def results(self) -> Mapping[str, RareNumbers]:
        """Return the shares of every site; empty if no batch held token ids."""
        if not any(self.tokens.values()):
            return {}
        numbers = {}
        for path, tokens in self.tokens.items():
            if not tokens:
                raise CalibrationError(f"{path} saw no query token that counts")
            rarest, two = self.hits[path].double() / tokens
            chance = (self.chances[path] / tokens).tolist()
            numbers[path] = RareNumbers(rarest, two, (chance[0], chance[1]), tokens, self.sentences)
        return numbers


def ranks_of(counts: Tensor) -> Tensor:
    """Return the rank of every token among the distinct counts, from 0 for the rarest: [V] int64."""
    if not isinstance(counts, Tensor) or counts.ndim != 1 or not counts.numel() or counts.is_complex():
        shape = tuple(counts.shape) if isinstance(counts, Tensor) else type(counts).__name__
        raise ArgumentError(f"token_counts: expected a tensor [V] of counts, found {shape}")
    if counts.is_meta:
        raise ArgumentError("token_counts: they are on the meta device, without values")
    if not bool(torch.isfinite(counts).all()) or float(counts.min()) < 0:
        raise ArgumentError("token_counts: some are negative or not finite; expected numbers of 0 or more")
    return torch.unique(counts.detach().cpu(), sorted=True, return_inverse=True)[1]
