"""Measure how far attention rollout moves if the map of a head is left out.

Rollout follows tokens through the maps of all layers. The map of a layer is W, the mean over its heads, and the
residual connection is the identity: Ã = 0.5 W + 0.5 I. The rollout of the output is the product of all Ã, from the last
layer to the first; row i says from which input tokens the output token i comes. Rollout has no heads, so we give it
some: without the map of a head, W is the mean over the others (I where there is none), and the worth of the head is
half the sum of the absolute differences between both rows, a share between 0 and 1.

The paper treats encoders. In an encoder-decoder the tokens of both sides are followed: cross-attention adds the rows of
the encoder to those of the decoder, Ã = 0.5 W R_encoder + 0.5 R_decoder.

Source: Abnar and Zuidema 2020, arXiv:2005.00928, section 3. The worth of a head is ours.

Shapes: B sentences, T query tokens, S key tokens, H heads, I input tokens of all sides together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.analysis.measures.passes import Attention, Batch, Observer
from collab_heads.analysis.measures.statistics import RunningMean
from collab_heads.base.numerics import float64
from collab_heads.running.batches import sides
from collab_heads.sites.site import AttentionSite

Rows = dict[str, Tensor]  # side -> [..., T, I], from which input tokens its tokens come


@dataclass(frozen=True, eq=False)
class Maps:
    """The maps of one call of a site.

    Attributes:
        site: the site.
        weights: [B, H, T, S], float64.
    """

    site: AttentionSite
    weights: Tensor

    @cached_property
    def mean(self) -> Tensor:
        """The mean over heads: [B, T, S]."""
        return self.weights.mean(1)

    def without_each(self) -> Tensor | None:
        """Return the mean over the other heads, for every head: [B, H, T, S]; None for a lone head."""
        heads = self.weights.shape[1]
        return (self.weights.sum(1, keepdim=True) - self.weights) / (heads - 1) if heads > 1 else None

    def passed(self, rows: Rows, weights: Tensor | None) -> Rows:
        """Return the rows after this call: 0.5 W R + 0.5 R.

        Args:
            rows: before this call.
            weights: [..., T, S], W; None for the residual connection alone.
        """
        queries, keys = sides(self.site)
        mixed = rows[queries] if weights is None else (weights @ rows[keys] + rows[queries]) / 2
        return {**rows, queries: mixed}


def input_rows(calls: Sequence[Maps]) -> Rows:
    """Return the rows before the first call: each token comes from itself, [1, T, I]."""
    lengths: dict[str, int] = {}
    for call in calls:
        lengths |= dict(zip(sides(call.site), call.weights.shape[-2:], strict=True))
    every = torch.eye(sum(lengths.values()), dtype=torch.float64, device=calls[0].weights.device)
    return dict(zip(lengths, every[None].split(list(lengths.values()), 1), strict=True))


def rolled_out(calls: Sequence[Maps]) -> list[Rows]:
    """Return the rows before every call, and after the last one."""
    rows = [input_rows(calls)]
    for call in calls:
        rows.append(call.passed(rows[-1], call.mean))
    return rows


def moved_by_heads(calls: Sequence[Maps], before: Sequence[Rows], path: str, side: str) -> Tensor:
    """Return how far the rollout of a side moves without each head of a site: [B, H, T].

    Args:
        calls: the calls of all sites, in the order in which they ran; a module that serves several layers has several.
        before: the rows before every call, and after the last one.
        path: of the site.
        side: whose rows are compared.
    """
    start = next(index for index, call in enumerate(calls) if call.site.path == path)
    rows = {name: each[:, None] for name, each in before[start].items()}  # (B, 1, T, I)
    for call in calls[start:]:
        own = call.site.path == path
        rows = call.passed(rows, call.without_each() if own else call.mean[:, None])
    moved = (rows[side] - before[-1][side][:, None]).abs().sum(-1) / 2
    return moved.expand(-1, calls[start].weights.shape[1], -1)


class Following(Observer):
    """An observer that keeps the maps of all calls of one batch, and then follows tokens through them.

    Args:
        model: the model.

    Attributes:
        means: path -> the mean of what was found.
    """

    weights = True

    def __init__(self, model: PreTrainedModel):
        self.decodes = model.config.is_encoder_decoder
        self.calls: list[Maps] = []
        self.means: dict[str, RunningMean] = {}
        self.batch: Batch

    def see_weights(self, site: AttentionSite, attention: Attention, batch: Batch) -> None:
        self.calls.append(Maps(site, float64(attention.weights)))
        self.batch = batch

    def finish(self, *_: object) -> None:
        """Follow the tokens of a batch: a forward hook of the model."""
        calls, self.calls = self.calls, []
        if calls:
            self.follow(calls)

    def follow(self, calls: Sequence[Maps]) -> None:
        """Add what the maps of a batch say to `means`.

        Args:
            calls: the calls of all sites, in the order in which they ran; a module that serves several layers has
                several.
        """
        raise NotImplementedError

    def output_of(self, calls: Sequence[Maps], site: AttentionSite) -> AttentionSite:
        """Return a site whose query tokens are the outputs that depend on a site: of the decoder where there is one."""
        if not self.decodes:
            return site
        return next(call.site for call in calls if sides(call.site)[0] == "decoder")


class Rollout(Following):
    """An observer that averages, over output tokens, how far the rollout moves without each head."""

    def follow(self, calls: Sequence[Maps]) -> None:
        before = rolled_out(calls)
        for path, site in {call.site.path: call.site for call in calls}.items():
            output = self.output_of(calls, site)
            moved = moved_by_heads(calls, before, path, sides(output)[0])  # (B, H, T)
            self.means.setdefault(path, RunningMean()).add(self.batch.counted(output, moved.mT))
