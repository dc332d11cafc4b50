"""Batches that several passes read, and the attention maps of typical sentences."""

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.analysis.measures.passes import Attention, Batch, Observer
from collab_heads.analysis.measures.token_texts import token_texts
from collab_heads.base.checks import check_count
from collab_heads.errors import ArgumentError
from collab_heads.running.batches import each_batch, sides, token_masks
from collab_heads.sites.site import AttentionSite


class Sentences:
    """Batches that can be read repeatedly, with a count of their sentences.

    Args:
        batches: input dicts, in a list or another object that starts anew with each iteration.

    Attributes:
        count: number of sentences in the last complete reading; 0 before.
    """

    def __init__(self, batches: Iterable[Mapping]):
        if isinstance(batches, Iterator):
            raise ArgumentError(
                f"batches is a {type(batches).__name__}, which can be read only once, and an analysis reads it several "
                "times: pass a list, or an object whose __iter__ starts anew, such as a DataLoader"
            )
        self.batches, self.count = batches, 0

    def __iter__(self) -> Iterator[Mapping]:
        count = 0
        for batch in each_batch(self.batches):
            count += rows(batch)
            yield batch
        self.count = count

    def __length_hint__(self) -> int:
        return operator.length_hint(self.batches)

    def first(self, number: int) -> Iterator[Mapping]:
        """Yield the batches of the first sentences, the last batch cut; raise ArgumentError if `number` is below 1."""
        check_count("the number of sentences", number, least=1)
        for batch in each_batch(self.batches):
            size = rows(batch)
            cut = size > number
            yield {k: v[:number] if cut and is_per_row(v, size) else v for k, v in batch.items()}
            number -= size
            if number <= 0:
                return

    def spread(self, number: int) -> Iterator[Mapping]:
        """Yield so many sentences, evenly spread: batches may be ordered by length; raise as `first` does."""
        check_count("the number of sentences", number, least=1)
        total, seen = sum(map(rows, self)), 0
        number = min(number, total)
        for batch in each_batch(self.batches):
            size = rows(batch)
            places = torch.arange(seen, seen + size + 1) * number // max(total, 1)
            kept = (places[1:] > places[:-1]).nonzero().flatten().tolist()  # the last of each stretch
            seen += size
            if kept:
                yield {k: v[kept] if len(kept) < size and is_per_row(v, size) else v for k, v in batch.items()}


def rows(batch: Mapping) -> int:
    return max((len(v) for v in batch.values() if isinstance(v, Tensor) and v.ndim), default=0)


def is_per_row(value: object, size: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == size


Place = tuple[int, int]  # number of a batch, row in it


def typical_sentences(model: PreTrainedModel, batches: Iterable[Mapping], number: int) -> list[Place]:
    """Choose sentences of typical lengths: the median for one, the quartiles for three, and so on.

    The model does not run. For encoder-decoders, lengths are those of the source.

    Returns:
        The places of the sentences, the shortest first.
    """
    places: list[tuple[int, Place]] = []
    for index, inputs in enumerate(batches) if number else ():
        masks = token_masks(model, inputs)
        if model.config.is_encoder_decoder:
            masks = {"encoder": masks.get("encoder")}
        mask = next((mask for mask in masks.values() if mask is not None), None)
        lengths = [width(inputs)] * rows(inputs) if mask is None else mask.sum(1).tolist()
        places += [(length, (index, row)) for row, length in enumerate(lengths)]
    places.sort()
    if len(places) > number:
        places = [places[math.ceil(len(places) * part / (number + 1)) - 1] for part in range(1, number + 1)]
    return [place for _, place in places]


def width(inputs: Mapping) -> int:
    """Return the length of the sentences of a batch without padding; 0 where it holds no ids."""
    ids = inputs.get("input_ids")
    return ids.shape[-1] if isinstance(ids, Tensor) else 0


@dataclass(eq=False)
class AttentionExample:
    """The attention of one sentence, or pair of sentences, without padding.

    Attributes:
        tokens: "encoder", "decoder" -> the tokens that the stack reads, as text.
        weights: path -> [H, T, S], float32 on the CPU; for the first layer if a module serves several.
        chosen: whether the user chose the sentence; others have typical lengths.
    """

    tokens: dict[str, tuple[str, ...]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    chosen: bool = False

    def of(self, site: AttentionSite) -> tuple[Tensor, tuple[str, ...], tuple[str, ...]]:
        """Return the weights [H, T, S] of a site, its query tokens (T) and its key tokens (S)."""
        queries, keys = sides(site)
        return self.weights[site.path], self.tokens[queries], self.tokens[keys]


class AttentionExamples(Observer):
    """An observer that keeps the attention maps of chosen sentences.

    Args:
        chosen: the places of the sentences, see `typical_sentences`.
        tokenizer: turns ids into text; None keeps the ids.
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
        """The examples, in the order in which their sentences were chosen."""
        return [self.seen[place] for place in self.chosen if place in self.seen]

    def begin(self, sites: Sequence[AttentionSite]) -> None:
        self.seen = {}

    def see_weights(self, site: AttentionSite, attention: Attention, batch: Batch) -> None:
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
        """Return the tokens of a sentence as text, or their positions if there are no ids."""
        if ids is None:
            return tuple(map(str, range(len(places))))
        sentence = ids[row].to(places.device)[places].tolist()
        if decodes and self.first_token is not None:
            sentence[0] = self.first_token  # what `Batch.ids` says there does not matter
        return token_texts(sentence, self.tokenizer)


def where(mask: Tensor | None, row: int, length: int) -> Tensor:
    return torch.arange(length) if mask is None else mask[row].nonzero().flatten().cpu()
