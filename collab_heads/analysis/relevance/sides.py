"""The two sides of what a model generates, and the top-1 logits that are explained."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from collab_heads.analysis.measures.passes import query_masks
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.errors import ArgumentError, CalibrationError
from collab_heads.running.batches import decoder_ids, token_masks


def top_logits(
    model: PreTrainedModel, outputs: ModelOutput, inputs: Mapping, exclude: tuple[int, ...], side: str
) -> tuple[Tensor, Tensor]:
    """Return the largest logit at every position at which a model predicts something.

    - Language models, translation models, taggers, logits [B, T, C]: one at every token that counts, without padding
      and excluded tokens; for decoders as in `query_masks`, on their inputs or, shifted right, their labels.
    - Classifiers, [B, C]: one. The same holds for a regression, where C = 1.
    - Question answering: one each for the start and the end.
    - Models without logits: the squared length of the mean last hidden state of the tokens that count, with one of the
      two factors constant. This explains a sentence embedding.
    - CLIP and similar models: the same for the embeddings of the text and of the image, before they are normalised.

    Args:
        model: the model.
        outputs: the outputs of the model.
        inputs: the batch that it was given.
        exclude: ids of tokens that do not count.
        side: the side whose tokens the positions are: "encoder" or "decoder".

    Returns:
        Values [B, P] for P positions, and which of them count: [B, P] bool.
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
    """Return the embeddings [B, D] of texts and of as many images; empty for other models."""
    stacks = [outputs.get(name) for name in ("text_model_output", "vision_model_output")]
    pooled = [stack.pooler_output for stack in stacks if stack is not None]
    return pooled if len({len(each) for each in pooled}) == 1 else []


def counted(model: PreTrainedModel, values: Tensor, inputs: Mapping, exclude: tuple[int, ...], side: str) -> Tensor:
    """Return which positions of values [B, T] count: [B, T] bool."""
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
    """Return the values of a user's `target`, [B] or [B, P], in the form of `top_logits`."""
    if not isinstance(values, Tensor) or values.ndim not in (1, 2) or not values.requires_grad:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ArgumentError(
            f"target gave {shape}: expected what the outputs of {type(model).__name__} lead to with gradients, one "
            "number per sentence (batch,) or per position (batch, positions)"
        )
    values = values.unsqueeze(-1) if values.ndim == 1 else values
    return values, torch.ones_like(values, dtype=torch.bool)


IGNORED = -100  # the label of tokens that are not predicted, in every loss of transformers


class Sides(ABC):
    """The two sides from which generated tokens come, such as source and target prefix.

    Attributes:
        names: the names of the two sides, for tables.
        roles: name of a stack -> the role of the self-attention in its first layer.
    """

    names: ClassVar[tuple[str, str]]
    roles: ClassVar[Mapping[str, str]]

    def in_batch(self, inputs: Mapping) -> bool:
        return True

    def explained(
        self, model: PreTrainedModel, outputs: ModelOutput, inputs: Mapping, exclude: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return the values to explain at every position, and which positions count: both [B, T]."""
        return top_logits(model, outputs, inputs, exclude, "decoder")

    @abstractmethod
    def tokens(self, model: PreTrainedModel, inputs: Mapping) -> Mapping[str, Tensor | None]:
        """Return stack -> which of the tokens that enter it are not padding: [B, T] bool, or None without padding."""

    @abstractmethod
    def ids(self, model: PreTrainedModel, inputs: Mapping) -> Mapping[str, Tensor | None]:
        """Return stack -> the ids of the tokens that enter it: [B, T], or None if they are not text."""

    @abstractmethod
    def first_side(self, inputs: Mapping) -> Mapping[str, Tensor]:
        """Return stack -> which of the tokens that enter it are of the first side: [B, T] bool, or one for all."""


class SourceAndTarget(Sides):
    """The source and the target prefix of an encoder-decoder."""

    names = ("source", "target prefix")
    roles: ClassVar[Mapping[str, str]] = {"source": "enc-self", "target": "dec-self"}

    def tokens(self, model, inputs):
        masks = token_masks(model, inputs)
        return {"source": masks["encoder"], "target": masks["decoder"]}

    def ids(self, model, inputs):
        """Return the ids of encoder and decoder, with the start token in place if labels are shifted."""
        target, start = decoder_ids(model, inputs), getattr(model.config, "decoder_start_token_id", None)
        if target is not None and inputs.get("decoder_input_ids") is None and start is not None:
            target = torch.cat([torch.full_like(target[:, :1], start), target[:, 1:]], dim=1)
        return {"source": inputs.get("input_ids"), "target": target}

    def first_side(self, inputs):
        return {"source": torch.tensor(True), "target": torch.tensor(False)}


class PromptAndContinuation(Sides):
    """The prompt and the continuation of a decoder alone: labels are the continuation, and -100 elsewhere."""

    names = ("prompt", "continuation")
    roles: ClassVar[Mapping[str, str]] = {"text": "dec-self"}

    def in_batch(self, inputs):
        """Return True if the labels leave out a prompt."""
        labels = inputs.get("labels")
        if labels is None or labels.ndim != 2:
            return False
        return bool(self.has_prompt(inputs, labels).any() and (labels != IGNORED).any())

    def has_prompt(self, inputs: Mapping, labels: Tensor) -> Tensor:
        prompt, mask = labels == IGNORED, inputs.get("attention_mask")
        return (prompt if mask is None else prompt & mask.bool()).any(1)

    def explained(self, model, outputs, inputs, exclude):
        """Return the top logits and which of them count: those of tokens whose next token has a label.

        Excluded ids have no effect here.
        """
        labels, kind = inputs.get("labels"), type(model).__name__
        if labels is None:
            raise CalibrationError(
                f"this {kind} needs labels that say where its prompt ends: the tokens of the continuation, and "
                f"{IGNORED} for those of the prompt and for padding"
            )
        values, _ = top_logits(model, outputs, inputs, (), "decoder")
        if labels.shape != values.shape:
            raise CalibrationError(
                f"labels {tuple(labels.shape)} do not fit what this {kind} puts out, {tuple(values.shape)}: give it "
                "one label per token, and a language modelling head"
            )
        counted = torch.zeros_like(labels, dtype=torch.bool)
        counted[:, :-1] = labels[:, 1:] != IGNORED
        if bool((counted.any(1) & ~self.has_prompt(inputs, labels)).any()):
            raise CalibrationError(f"a sentence has no prompt: give its tokens the label {IGNORED}")
        return values, counted

    def tokens(self, model, inputs):
        return {"text": token_masks(model, inputs)["decoder"]}

    def ids(self, model, inputs):
        return {"text": inputs.get("input_ids")}

    def first_side(self, inputs):
        """Mark the tokens without a label.

        Padding, and tokens after the explained position, are among them but have no relevance for it.
        """
        return {"text": inputs["labels"] == IGNORED}


def sides_of(model: PreTrainedModel, adapter: AttentionAdapter) -> Sides | None:
    """Return the sides of a model; None for encoders, and for decoders that read the output of another model."""
    roles = {site.role for site in adapter.sites(model)}
    if model.config.is_encoder_decoder:
        return SourceAndTarget() if {"enc-self", "dec-self"} <= roles else None
    return PromptAndContinuation() if roles == {"dec-self"} else None
