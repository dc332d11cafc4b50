"""A decoder with a cache of one size, which an engine holds that plans its memory when a program is written."""

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.configuration_utils import get_head_shapes

from collab_heads.layers.attention import CACHE
from collab_heads.running.batches import longest_text

POSITION = "cache_position"  # as transformers' recipe and ExecuTorch's own runner call it
ROOM = 2048  # tokens that a cache has room for, at most
PORTION = 128  # tokens that are read at a time, at most: memory is planned for their scores, and for logits of each
LENGTH = "max_cache_len"  # in the `cache_config` of a generation config, as for transformers' recipe


class FixedCacheDecoder(nn.Module):
    """A decoder that reads the next tokens of one text; a layer caches as many heads, as wide, as it has.

    transformers' own recipe gives a model no mask and no positions; some make them, of a number of tokens that is not
    known when a graph is made. So both are given here. Layers with a sliding window have room for all tokens, too, and
    the mask hides those outside.

    Args:
        model: a decoder without an encoder.
        room: the tokens that its cache has room for.
    """

    def __init__(self, model: PreTrainedModel, room: int):
        super().__init__()
        self.model, self.room, self.config = model, room, model.config
        config = model.config.get_text_config(decoder=True)
        self.cache: Any = StaticCache(config=config, max_cache_len=room)
        self.cache.layers = [StaticLayer(room) for _ in self.cache.layers]
        self.cache.early_initialization(1, *get_head_shapes(config), model.dtype, model.device)
        for number, layer in enumerate(cast(Any, self.cache).layers):
            self.register_buffer(f"keys_{number}", layer.keys, persistent=False)
            self.register_buffer(f"values_{number}", layer.values, persistent=False)
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> dict[str, Tensor]:
        """Return the `logits`, [1, T, V].

        Args:
            input_ids: [1, T], the next tokens.
            cache_position: [T], their places in the text; what the cache has from the first on is forgotten.
        """
        for number, layer in enumerate(self.cache.layers):
            layer.keys, layer.values = getattr(self, f"keys_{number}"), getattr(self, f"values_{number}")
            layer.cumulative_length = cache_position[0].clone()
        given: dict[str, Any] = {CACHE: self.cache, "use_cache": True}
        given["attention_mask"] = (torch.arange(self.room) <= cache_position[-1])[None].long()
        if self.takes_positions:
            given["position_ids"] = cache_position[None]
        return {"logits": self.model(input_ids=input_ids, **given).logits}

    def example(self) -> dict[str, Tensor]:
        """Return inputs to export it with."""
        count = min(3, self.portion())
        return {"input_ids": torch.zeros(1, count, dtype=torch.long), POSITION: torch.arange(count)}

    def sizes(self) -> dict[str, dict[int, Any]]:
        """Return how large each input may be."""
        return {
            "input_ids": {1: Dim.AUTO(min=1, max=self.portion())},
            POSITION: {0: Dim.AUTO(min=1, max=self.portion())},
        }

    def portion(self) -> int:
        """Return how many tokens are read at a time, at most."""
        return min(PORTION, self.room)


def room_of(model: PreTrainedModel) -> int:
    """Return how many tokens the cache of a decoder has room for: what its generation config says, or what it reads."""
    chosen = (getattr(model.generation_config, "cache_config", None) or {}).get(LENGTH)
    return min(ROOM, longest_text(model) or ROOM) if chosen is None else chosen
