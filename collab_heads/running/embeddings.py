"""Embed texts with a model that has no head: its own embeddings, or the mean of its states."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from collab_heads.errors import UnsupportedModelError


@torch.no_grad()
def embed(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> Tensor:
    """Return sentence embeddings [N, D] of unit length: mean-pooled, unless the model puts out its own.

    Args:
        model: puts out `last_hidden_state`, or `sentence_embedding`.
        batches: its inputs, with an `attention_mask` each.

    Raises:
        UnsupportedModelError: if it puts out no states.
    """
    rows = []
    for batch in batches:
        outputs, mask = model(**batch), batch["attention_mask"][..., None]
        if (own := outputs.get("sentence_embedding")) is not None:
            rows.append(own)
            continue
        hidden = outputs.get("last_hidden_state")
        if hidden is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} puts out no last_hidden_state, which would be the embedding of a text: give a "
                "model without a head"
            )
        rows.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(rows), dim=-1)
