"""Keep the attention maps of a few sentences, to look at."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from collab_heads.analysis.measures.passes import Attention, Batch, Observer
from collab_heads.analysis.measures.typical import Place
from collab_heads.model.masks import sides
from collab_heads.sites import AttentionSite


@dataclass(eq=False)
class AttentionExample:
    """One sentence, or pair of sentences, without padding.

    Attributes:
        tokens: "encoder", "decoder" -> the tokens that the stack reads, as text.
        weights: path -> [H, T, S], float32 on the CPU; of the first layer that a module serves.
    """

    tokens: dict[str, tuple[str, ...]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def of(self, site: AttentionSite) -> tuple[Tensor, tuple[str, ...], tuple[str, ...]]:
        """Weights [H, T, S] of a site, the tokens that attend (T) and those attended to (S)."""
        queries, keys = sides(site)
        return self.weights[site.path], self.tokens[queries], self.tokens[keys]


class AttentionExamples(Observer):
    """The attention maps of some sentences of the data.

    Args:
        chosen: where they are, see `typical_sentences`.
        tokenizer: turns ids into text; None shows ids.
        first_token: id of the token that a decoder reads first.
    """

    weights = True

    def __init__(
        self,
        chosen: Sequence[Place],
        tokenizer: PreTrainedTokenizerBase | None = None,
        first_token: int | None = None,
    ):
        self.chosen, self.tokenizer, self.first_token = tuple(chosen), tokenizer, first_token
        self.seen: dict[Place, AttentionExample] = {}

    @property
    def kept(self) -> list[AttentionExample]:
        """The sentences, in the order in which they were chosen."""
        return [self.seen[place] for place in self.chosen if place in self.seen]

    def begin(self, sites: Sequence[AttentionSite]) -> None:
        """Begin with none."""
        self.seen = {}

    def see_weights(self, site: AttentionSite, attention: Attention, batch: Batch) -> None:
        """Keep the weights of the sentences of the batch that were chosen."""
        weights = attention.weights
        masks = batch.unpadded_queries(site), batch.keys(site)
        for place in self.chosen:
            index, row = place
            if index != batch.index or row >= len(weights):
                continue
            example = self.seen.setdefault(place, AttentionExample())
            if site.path in example.weights:
                continue  # a module that serves several layers
            unpadded = [where(mask, row, length) for mask, length in zip(masks, weights.shape[-2:], strict=True)]
            example.weights[site.path] = weights[row][:, unpadded[0]][:, :, unpadded[1]].detach().float().cpu()
            for side, places in zip(sides(site), unpadded, strict=True):
                if side not in example.tokens:
                    example.tokens[side] = self.text(batch.ids(side), row, places, side == "decoder")

    def text(self, ids: Tensor | None, row: int, places: Tensor, decodes: bool) -> tuple[str, ...]:
        """The tokens of a sentence as text; positions where there are no ids."""
        if ids is None:
            return tuple(map(str, range(len(places))))
        sentence = ids[row].to(places.device)[places].tolist()
        if decodes and self.first_token is not None:
            sentence[0] = self.first_token  # what `Batch.ids` says there does not matter
        return tuple(map(str, sentence if self.tokenizer is None else self.tokenizer.convert_ids_to_tokens(sentence)))


def where(mask: Tensor | None, row: int, length: int) -> Tensor:
    """The positions of a row that are no padding."""
    return torch.arange(length) if mask is None else mask[row].nonzero().flatten().cpu()
