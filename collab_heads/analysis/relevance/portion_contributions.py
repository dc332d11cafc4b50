"""The contributions of all tokens of a portion of a batch, sentence by sentence, without padding."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from collab_heads.analysis.relevance.sentence_contributions import (
    SentenceContributions,
    TokenRelevance,
    of_sentence,
)
from collab_heads.analysis.relevance.sides import Sides
from collab_heads.analysis.relevance.token_relevance import relevance_of_tokens
from collab_heads.errors import NonFiniteError


@dataclass(frozen=True)
class Portion:
    """What a model was given, and what it made of it.

    Attributes:
        model: the model.
        sides: what its output is made of.
        inputs: the portion of a batch.
        outputs: what the model returned.
        states: name of a stack -> what enters it, [B, S, D].
        last: what enters the language modelling head, [B, T, D], if that is known.
    """

    model: PreTrainedModel
    sides: Sides
    inputs: Mapping
    outputs: ModelOutput
    states: Mapping[str, Tensor]
    last: Tensor | None

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the tokens of all stacks: which are of the first side, which are no padding, their ids or -1: [B, C]."""
        first, used, ids = [], [], []
        masks, texts = self.sides.tokens(self.model, self.inputs), self.sides.ids(self.model, self.inputs)
        for name, is_first in self.sides.first_side(self.inputs).items():
            shape = self.states[name].shape[:2]
            mask, text = masks[name], texts[name]
            first.append(is_first.cpu().expand(shape))
            used.append((torch.ones(shape, dtype=torch.bool) if mask is None else mask.cpu()).expand(shape))
            known = text is not None and text.shape == shape
            ids.append(text.cpu() if known and text is not None else torch.full(shape, -1))
        return torch.cat(first, 1), torch.cat(used, 1), torch.cat(ids, 1)


def sentences_of(portion: Portion, exclude: tuple[int, ...], keep_relevance: bool) -> list[SentenceContributions]:
    """What the tokens of every sentence contribute, in the order of the rows.

    Raises:
        NonFiniteError: if a share is NaN or inf.
    """
    values, counted = portion.sides.explained(portion.model, portion.outputs, portion.inputs, exclude)
    counted = counted.cpu()
    positions = counted.any(0).nonzero().flatten()
    states = [portion.states[name] for name in portion.sides.roles]
    relevance = relevance_of_tokens(values, positions.tolist(), states, portion.last)
    first, used, ids = portion.columns()
    used[:, -counted.shape[1] :] &= counted.flip(1).cumsum(1).flip(1) > 0  # what comes after the last is never read
    said = first_choices(portion.outputs)
    sentences = []
    for row, mask in enumerate(counted[:, positions]):  # the n-th token that counts is at position n
        mine = relevance[row, mask][:, used[row]]
        if not torch.isfinite(mine).all() or bool((mine.abs().sum(-1) == 0).any()):
            raise NonFiniteError(
                f"a contribution to what {type(portion.model).__name__} says is NaN or inf; look at its weights"
            )
        is_source = first[row, used[row]]
        sentence = of_sentence(mine, is_source)
        if keep_relevance:
            mine_ids = ids[row, used[row]]
            kept = TokenRelevance(
                source=mine[:, is_source],
                target=mine[:, ~is_source],
                source_ids=known_ids(mine_ids[is_source]),
                target_ids=known_ids(mine_ids[~is_source]),
                said=() if said is None else tuple(said[row, positions[mask]].tolist()),
            )
            sentence = replace(sentence, relevance=kept)
        sentences.append(sentence)
    return sentences


def first_choices(outputs: ModelOutput) -> Tensor | None:
    """The ids of the largest logits, [B, T]; None for a model without."""
    logits = getattr(outputs, "logits", None)
    return None if logits is None or logits.ndim != 3 else logits.argmax(-1).cpu()


def known_ids(ids: Tensor) -> tuple[int, ...]:
    """Ids of tokens; empty where there are none."""
    return tuple(ids.tolist()) if len(ids) and bool((ids >= 0).all()) else ()
