"""Adapters for families with fused projections of query, key and value, or with rotary positions.

A stock module keeps its fused projections, whose parts are views (`layers.fused`). A collaborative module has a
separate Linear for the values, under the name in `value`, which no stock module of the family has.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from collab_heads.contract.adapter import AttentionAdapter, Capability
from collab_heads.layers.fused import FusedPart, Projection
from collab_heads.layers.removed import is_empty
from collab_heads.sites.state import QueryKeyKind


class FusedAdapter(AttentionAdapter, ABC):
    """An adapter for families with fused projections; `fused` names them and their parts.

    `query`, `key` and `value` are the names of the projections that replace them in a changed module, or while it is
    initialised.
    """

    @abstractmethod
    def fused(self, module: nn.Module) -> Mapping[str, Sequence[str]]:
        """Return the fused projections of a stock module -> the parts of each: `query`, `key`, `value`, in order."""

    def parts(self, module: nn.Module) -> dict[str, FusedPart]:
        """Return query, key and value of a stock attention module, by their names."""
        return {
            made: FusedPart(getattr(module, name), number, len(makes))
            for name, makes in self.fused(module).items()
            for number, made in enumerate(makes)
        }

    def projections(self, module: nn.Module) -> tuple[Projection, Projection]:
        """Return parts of fused projections, or their stand-ins while a changed module is initialised."""
        if hasattr(module, self.query):
            return super().projections(module)
        parts = self.parts(module)
        return parts[self.query], parts[self.key]

    def value_projection(self, module: nn.Module) -> Projection:
        """Return a part of a fused projection of a stock module, or the Linear of a changed one."""
        return super().value_projection(module) if hasattr(module, self.value) else self.parts(module)[self.value]

    def wholes(self, module: nn.Module) -> dict[nn.Module, int]:
        """Return the fused projections -> how many of query, key and value each makes."""
        return {getattr(module, name): len(makes) for name, makes in self.fused(module).items()}

    def stock_names(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of the fused projections."""
        return tuple(self.fused(module))

    def install(self, module: nn.Module, query_key: nn.Module) -> None:
        """As `AttentionAdapter`; also give the values a Linear of their own and remove the fused projections."""
        if not hasattr(module, self.value):
            setattr(module, self.value, self.parts(module)[self.value].as_linear())
        for name in self.fused(module):
            if hasattr(module, name):
                delattr(module, name)
        super().install(module, query_key)

    def shrink(self, module: nn.Module, kept: list[int]) -> None:
        """As `AttentionAdapter`; a site that loses all its heads also loses its fused projections."""
        if not kept and not hasattr(module, self.value):
            setattr(module, self.value, nn.Identity())  # what `shrink` takes away
        super().shrink(module, kept)

    @torch.no_grad()
    def restore(self, module: nn.Module, stock: nn.Module, kept: Sequence[int]) -> None:
        """Undo `shrink`, part by part."""
        heads, parts = self.num_heads(stock), {} if is_empty(module) else self.parts(module)
        for name, full in self.parts(stock).items():
            for tensor in full.parameters():
                tensor.zero_()
            if name in parts:
                for (part, tensor), rows in zip(full.named_parameters(), parts[name].parameters(), strict=True):
                    tensor.unflatten(0, (heads, -1))[list(kept)] = rows.unflatten(0, (len(kept), -1))
                    full.whole.get_parameter(part).requires_grad_(rows.requires_grad)
        for name in self.fused(stock):
            setattr(module, name, getattr(stock, name).train(module.training))
        if is_empty(module):
            del module.query_key
            delattr(module, self.value)
        self.note_heads(module, heads, None)
        if self.width is not None:
            setattr(module, self.width, getattr(stock, self.width))
        module.__class__ = type(stock)


class RotaryAdapter(AttentionAdapter):
    """An adapter for families with rotary positions, whose heads cannot share one query/key projection.

    Positions are rotations between projection and score. Everything else works: narrower heads keep some of their
    frequency pairs. Where the stock forward cannot run the heads that are left (narrower heads, key heads used by
    unequal numbers of heads), a replacement class does, with a projection of the kind "rotary".
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {"per_head", "gated", "alpha", "prune", "values", "neurons"}
    )
    why_not: ClassVar[Mapping[Capability, str]] = {
        "collaborative": "rotary positions come between its projections and the score, so heads cannot share one "
        'query/key projection; narrower queries and keys of each head (kind="per_head"), narrower values '
        "(dim_value=), fewer heads and compress() work"
    }
    exact_kind: ClassVar[QueryKeyKind] = "rotary"
    positions: ClassVar[str | None] = "position_embeddings"


class NormedRotaryAdapter(RotaryAdapter):
    """An adapter for rotary positions with norms of queries and keys per head, which cannot become narrower either.

    The norm divides a head by the size of all its dimensions together. Without some of them the others become larger by
    a factor that differs from token to token, which no weights can undo.
    """

    capabilities: ClassVar[frozenset[Capability]] = RotaryAdapter.capabilities - {"per_head"}
    why_not: ClassVar[Mapping[Capability, str]] = {
        "collaborative": "rotary positions come between its projections and the score, so heads cannot share one "
        "query/key projection; narrower values (dim_value=), fewer heads and compress() work",
        "per_head": "its queries and keys are normed per head, over all dimensions of a head: without some of them the "
        "others would be normed otherwise for every token; narrower values (dim_value=), fewer heads and compress() "
        "work",
    }
