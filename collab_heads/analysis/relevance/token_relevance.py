"""The relevance of every token that a model reads to every token that it generates, and what can be said of it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def relevance_of_tokens(
    values: Tensor, positions: Sequence[int], states: Sequence[Tensor], last: Tensor | None = None
) -> Tensor:
    """Input times gradient, summed over the width of the states: one backward pass per position.

    Args:
        values: [B, T], what is explained; sentences and positions do not mix after `last`.
        positions: those that are to be explained.
        states: what enters each stack, [B, S, D].
        last: [B, T, D], what enters the language modelling head, if that is known. The gradient goes through the
            vocabulary only once then, not for every position.

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
    """Position -> where its backward pass begins, and with which gradient."""
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
    """Absolute relevance as shares that sum to one over some tokens: [..., C] and [C] or [..., C] bool; 0 elsewhere.

    Where all relevance is 0 there are no shares: 0.
    """
    sizes = relevance.abs() * tokens
    whole = sizes.sum(-1, keepdim=True)
    return sizes / whole.masked_fill(whole == 0, 1.0)


def entropy(distribution: Tensor) -> Tensor:
    """The entropy of shares over the last dimension, in nats; of nothing, 0."""
    return torch.special.entr(distribution).sum(-1)
