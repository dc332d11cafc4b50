"""The relevance of every token that a model reads to every token that it generates, and measures of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from collab_heads.analysis.measures.token_texts import token_texts


def relevance_of_tokens(
    values: Tensor, positions: Sequence[int], states: Sequence[Tensor], last: Tensor | None = None
) -> Tensor:
    """Return input times gradient, summed over the width of the states, with one backward pass per position.

    Args:
        values: [B, T], the values to explain; sentences and positions do not mix after `last`.
        positions: the positions to explain.
        states: the input of each stack, [B, S, D].
        last: [B, T, D], the input of the language modelling head, if known. The gradient then passes through the
            vocabulary only once, not for every position.

    Returns:
        [B, P, C], signed, float64 on the CPU: a column per token of the stacks, one stack after the other.
    """
    start, rows = starts(values, last), []
    for position in positions:
        begin, slope = start(position)
        # a decoder without heads on the source does not use it
        gradients = torch.autograd.grad(
            begin, states, slope, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        products = [(state.detach() * each).sum(-1) for state, each in zip(states, gradients, strict=True)]
        rows.append(torch.cat([each.cpu().double() for each in products], dim=1))  # (B, C)
    width = sum(state.shape[1] for state in states)
    return torch.stack(rows, dim=1) if rows else torch.zeros(len(values), 0, width, dtype=torch.float64)


def starts(values: Tensor, last: Tensor | None) -> Callable[[int], tuple[Tensor, Tensor | None]]:
    """Return position -> the tensor at which its backward pass begins, and with which gradient."""
    if last is None or last.shape[:2] != values.shape or not last.requires_grad:
        return lambda position: (values[:, position].sum(), None)
    state = last
    (slopes,) = torch.autograd.grad(values.sum(), state, retain_graph=True)

    def start(position: int) -> tuple[Tensor, Tensor]:
        only = torch.zeros_like(slopes)
        only[:, position] = slopes[:, position]
        return state, only

    return start


def shares(relevance: Tensor, tokens: Tensor) -> Tensor:
    """Return absolute relevance as shares that sum to one over some tokens, and are 0 elsewhere.

    Relevance is [..., C], tokens is [C] or [..., C] bool. If all relevance is 0, the shares are 0.
    """
    sizes = relevance.abs() * tokens
    whole = sizes.sum(-1, keepdim=True)
    return sizes / whole.masked_fill(whole == 0, 1.0)


def entropy(distribution: Tensor) -> Tensor:
    """Return the entropy of shares over the last dimension, in nats; 0 if all are 0."""
    return torch.special.entr(distribution).sum(-1)


NUMBERS = ("source", "source_entropy", "target_entropy", "influence")


@dataclass(frozen=True, eq=False)
class TokenRelevance:
    """The relevance of every token of a sentence to every generated token.

    There are P generated tokens, S of the source and T of the target.

    Attributes:
        source: [P, S], signed, in units of the explained logit.
        target: [P, T], the same for the target prefix (the continuation, for a decoder alone); 0 for later tokens.
        source_ids: [S], the ids of the source tokens; empty if the source is not text.
        target_ids: [T], the same for the target.
        said: [P], the explained tokens, which are the model's first choices; empty for a model without logits.
    """

    source: Tensor
    target: Tensor
    source_ids: tuple[int, ...] = ()
    target_ids: tuple[int, ...] = ()
    said: tuple[int, ...] = ()

    def contributions(self) -> tuple[Tensor, Tensor]:
        """Return [P, S] and [P, T]: absolute relevance as shares; a row of both sums to one."""
        both = torch.cat([self.source, self.target], dim=1)
        split = [self.source.shape[1], self.target.shape[1]]
        source, target = shares(both, torch.ones_like(both, dtype=torch.bool)).split(split, dim=1)
        return source, target

    def words(
        self, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Return source, target and generated tokens as text: [S], [T], [P].

        Without a tokenizer the texts are ids, and without ids they are positions.
        """
        sizes = (self.source.shape[1], self.target.shape[1], len(self.source))
        source, target, said = (
            as_text(ids, size, tokenizer)
            for ids, size in zip((self.source_ids, self.target_ids, self.said), sizes, strict=True)
        )
        return source, target, said

    def to_dict(self) -> dict[str, Any]:
        ids = {name: list(getattr(self, name)) for name in ("source_ids", "target_ids", "said")}
        return {"source": self.source.tolist(), "target": self.target.tolist()} | ids

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> "TokenRelevance":
        source, target = (as_matrix(stored[name]) for name in ("source", "target"))
        ids = (tuple(map(int, stored[name])) for name in ("source_ids", "target_ids", "said"))
        return cls(source, target, *ids)


@dataclass(frozen=True, eq=False)
class SentenceContributions:
    """The contributions of one sentence, with P generated tokens and S source tokens; float64 on the CPU.

    Attributes:
        source: [P], the share of the source; the rest is that of the target prefix.
        source_entropy: [P], how widely the source's share is spread over its tokens, in nats; 0 if it comes from a
            single token, or there is none.
        target_entropy: [P], the same for the target prefix.
        influence: [S], how much each source token contributes to the whole output, where 1 is the mean source token:
            contributions as shares of the source's, averaged over the generated tokens, times S.
        relevance: the relevance of every token to every token, if it was kept.
    """

    source: Tensor
    source_entropy: Tensor
    target_entropy: Tensor
    influence: Tensor
    relevance: TokenRelevance | None = None

    def to_dict(self) -> dict[str, Any]:
        kept = {} if self.relevance is None else {"relevance": self.relevance.to_dict()}
        return {name: getattr(self, name).tolist() for name in NUMBERS} | kept

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> "SentenceContributions":
        relevance = TokenRelevance.from_dict(stored["relevance"]) if "relevance" in stored else None
        return cls(**{name: as_tensor(stored[name]) for name in NUMBERS}, relevance=relevance)


def of_sentence(relevance: Tensor, is_source: Tensor) -> SentenceContributions:
    """Return the contributions of the tokens of one sentence.

    Args:
        relevance: [P, C], signed, of its tokens to the generated ones.
        is_source: [C] bool; the others are tokens of the target.
    """
    everything = shares(relevance, torch.ones_like(is_source))
    of_source, of_target = shares(relevance, is_source), shares(relevance, ~is_source)
    # without heads on the source nothing comes from it, and no token of it has more than another
    influence = of_source[:, is_source].mean(0) * int(is_source.sum()) if len(relevance) else relevance.new_zeros(0)
    return SentenceContributions(
        source=(everything * is_source).sum(-1),
        source_entropy=entropy(of_source),
        target_entropy=entropy(of_target),
        influence=influence,
    )


def as_text(ids: tuple[int, ...], size: int, tokenizer: PreTrainedTokenizerBase | None) -> tuple[str, ...]:
    if not ids:
        return tuple(map(str, range(size)))
    return token_texts(ids, tokenizer)


def as_tensor(values: Sequence) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def as_matrix(rows: Sequence[Sequence[float]]) -> Tensor:
    """Return rows of numbers read from JSON as a float64 matrix; no rows give [0, 0]."""
    return as_tensor(rows).reshape(len(rows), len(rows[0]) if rows else 0)
