"""What a generated token can come from: the source and the target prefix, or the prompt and its continuation."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from collab_heads.analysis.relevance.targets import top_logits
from collab_heads.attention_adapter import AttentionAdapter
from collab_heads.errors import CalibrationError
from collab_heads.model.masks import decoder_ids, token_masks

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
