"""What of a model's output is explained: its top-1 logits."""

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
from collab_heads.model.batches import decoder_ids, token_masks


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


IGNORED = -100  # the label of a token that is none to predict, in every loss of transformers


class Sides(ABC):
    """The two things that what a model generates is made of.

    Attributes:
        names: of the two, for tables.
        roles: name of a stack -> the self-attention that it begins with.
    """

    names: ClassVar[tuple[str, str]]
    roles: ClassVar[Mapping[str, str]]

    def in_batch(self, inputs: Mapping) -> bool:
        """Whether a batch has both sides."""
        return True

    def explained(
        self, model: PreTrainedModel, outputs: ModelOutput, inputs: Mapping, exclude: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """What is explained at every position, and which positions count: both [B, T]."""
        return top_logits(model, outputs, inputs, exclude, "decoder")

    @abstractmethod
    def tokens(self, model: PreTrainedModel, inputs: Mapping) -> Mapping[str, Tensor | None]:
        """Name of a stack -> which of the tokens that enter it are no padding: [B, T] bool, or None where all are."""

    @abstractmethod
    def ids(self, model: PreTrainedModel, inputs: Mapping) -> Mapping[str, Tensor | None]:
        """Name of a stack -> the ids of the tokens that enter it: [B, T], or None where they are no text."""

    @abstractmethod
    def first_side(self, inputs: Mapping) -> Mapping[str, Tensor]:
        """Name of a stack -> which of the tokens that enter it are of the first side: [B, T] bool, or one for all."""


class SourceAndTarget(Sides):
    """Of an encoder-decoder."""

    names = ("source", "target prefix")
    roles: ClassVar[Mapping[str, str]] = {"source": "enc-self", "target": "dec-self"}

    def tokens(self, model, inputs):
        """Of encoder and decoder."""
        masks = token_masks(model, inputs)
        return {"source": masks["encoder"], "target": masks["decoder"]}

    def ids(self, model, inputs):
        """Of encoder and decoder; its first token is known where labels are shifted."""
        target, start = decoder_ids(model, inputs), getattr(model.config, "decoder_start_token_id", None)
        if target is not None and inputs.get("decoder_input_ids") is None and start is not None:
            target = torch.cat([torch.full_like(target[:, :1], start), target[:, 1:]], dim=1)
        return {"source": inputs.get("input_ids"), "target": target}

    def first_side(self, inputs):
        """All that enters the encoder."""
        return {"source": torch.tensor(True), "target": torch.tensor(False)}


class PromptAndContinuation(Sides):
    """Of a decoder alone: labels are the continuation, and -100 elsewhere."""

    names = ("prompt", "continuation")
    roles: ClassVar[Mapping[str, str]] = {"text": "dec-self"}

    def in_batch(self, inputs):
        """Whether labels leave a prompt out."""
        labels = inputs.get("labels")
        if labels is None or labels.ndim != 2:
            return False
        return bool(self.has_prompt(inputs, labels).any() and (labels != IGNORED).any())

    def has_prompt(self, inputs: Mapping, labels: Tensor) -> Tensor:
        """Which sentences have a prompt: [B] bool."""
        prompt, mask = labels == IGNORED, inputs.get("attention_mask")
        return (prompt if mask is None else prompt & mask.bool()).any(1)

    def explained(self, model, outputs, inputs, exclude):
        """A token predicts the next one, if that has a label, whatever is excluded elsewhere.

        Raises:
            CalibrationError: if there are no labels, they do not fit, or a sentence has no prompt.
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
        """Of the one stack."""
        return {"text": token_masks(model, inputs)["decoder"]}

    def ids(self, model, inputs):
        """Of the one stack."""
        return {"text": inputs.get("input_ids")}

    def first_side(self, inputs):
        """What has no label; later tokens reach no earlier position, nor does padding."""
        return {"text": inputs["labels"] == IGNORED}


def sides_of(model: PreTrainedModel, adapter: AttentionAdapter) -> Sides | None:
    """The sides that a model has; None for encoders, and for decoders that look at what another model has read."""
    roles = {site.role for site in adapter.sites(model)}
    if model.config.is_encoder_decoder:
        return SourceAndTarget() if {"enc-self", "dec-self"} <= roles else None
    return PromptAndContinuation() if roles == {"dec-self"} else None
