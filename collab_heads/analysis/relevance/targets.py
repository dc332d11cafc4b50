"""What of a model's output is explained: its top-1 logits."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from collab_heads.analysis.measures.queries import query_masks
from collab_heads.errors import ArgumentError, CalibrationError


def top_logits(
    model: PreTrainedModel, outputs: ModelOutput, inputs: Mapping, exclude: tuple[int, ...], side: str
) -> tuple[Tensor, Tensor]:
    """The largest logit at every position that a model predicts something at.

    - Language models, translation models, taggers, logits [B, T, C]: one at every token that counts, padding and
      excluded tokens left out; for decoders as `query_masks` says, on their inputs or, shifted right, their labels.
    - Classifiers, [B, C]: one. So for a regression, where C = 1.
    - Question answering: one each for the start and the end.
    - Models without logits: the squared length of the mean of the last hidden states of the tokens that count, one of
      the two factors a constant: what makes a sentence's embedding what it is.
    - CLIP and its like: the same of the embedding of the text and of that of the image, before they are normed.

    Args:
        model: the model.
        outputs: what it returned.
        inputs: the batch that it was given.
        exclude: ids of tokens that do not count.
        side: whose tokens the positions are: "encoder" or "decoder".

    Returns:
        Values [B, P], for P positions, and which of them count: [B, P] bool.

    Raises:
        ArgumentError: if the model returned nothing of this kind.
        CalibrationError: if a mask does not fit the positions; both shapes are named.
    """
    if (logits := getattr(outputs, "logits", None)) is not None:
        values = logits.max(-1).values
        if logits.ndim > 2:
            return values, counted(model, values, inputs, exclude, side)
        values = values.unsqueeze(-1)
    elif (starts := getattr(outputs, "start_logits", None)) is not None:
        tokens = counted(model, starts, inputs, (), side)
        both = torch.stack([starts, outputs["end_logits"]], dim=1)  # (B, 2, T)
        values = both.masked_fill(~tokens.unsqueeze(1), -torch.inf).max(-1).values
    elif (states := getattr(outputs, "last_hidden_state", None)) is not None:
        mask = counted(model, states[..., 0], inputs, exclude, side).to(states.dtype).unsqueeze(-1)
        mean = (states * mask).sum(1) / mask.sum(1).clamp(min=1)  # (B, D)
        values = (mean * mean.detach()).sum(-1, keepdim=True)
    elif pooled := embeddings_before_norms(outputs):
        values = torch.stack([(each * each.detach()).sum(-1) for each in pooled], dim=1)
    else:
        raise ArgumentError(
            f"{type(model).__name__} returns {', '.join(outputs.keys())}: neither logits nor a last hidden state; say "
            "what to explain with target="
        )
    return values, torch.ones_like(values, dtype=torch.bool)


def embeddings_before_norms(outputs: ModelOutput) -> list[Tensor]:
    """The embeddings [B, D] of texts and of as many images; empty for other models."""
    stacks = [outputs.get(name) for name in ("text_model_output", "vision_model_output")]
    pooled = [stack.pooler_output for stack in stacks if stack is not None]
    return pooled if len({len(each) for each in pooled}) == 1 else []


def counted(model: PreTrainedModel, values: Tensor, inputs: Mapping, exclude: tuple[int, ...], side: str) -> Tensor:
    """Which positions of values [B, T] count: [B, T] bool."""
    mask = query_masks(model, inputs, exclude)[side]
    if mask is None:
        return torch.ones_like(values, dtype=torch.bool)
    if mask.shape != values.shape:
        raise CalibrationError(
            f"{type(model).__name__} returned outputs of {tuple(values.shape)} positions where the {side} mask has "
            f"{tuple(mask.shape)}; give attention masks of shape (batch, tokens)"
        )
    return mask.to(values.device)


def checked_target_values(values: object, model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """What a user's `target` gave, [B] or [B, P], as `top_logits` returns it.

    Raises:
        ArgumentError: if it is something else, or does not depend on the model.
    """
    if not isinstance(values, Tensor) or values.ndim not in (1, 2) or not values.requires_grad:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ArgumentError(
            f"target gave {shape}: expected what the outputs of {type(model).__name__} lead to with gradients, one "
            "number per sentence (batch,) or per position (batch, positions)"
        )
    values = values.unsqueeze(-1) if values.ndim == 1 else values
    return values, torch.ones_like(values, dtype=torch.bool)
