"""Pairs of sentences as a translation model takes them: tokenized, padded, with labels."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

IGNORED = -100  # labels that do not count


def tokenize(
    pairs: Mapping[str, Sequence[str]],
    tokenizer: PreTrainedTokenizerBase,
    prefix: str,
    max_source: int,
    max_target: int,
) -> dict[str, list[list[int]]]:
    """Tokenize pairs.

    Args:
        pairs: "source" and "target" -> sentences.
        tokenizer: with its languages set, where it has any.
        prefix: put before every source sentence (T5).
        max_source: the longest input, in tokens.
        max_target: the longest output, in tokens.

    Returns:
        `input_ids` and `labels`, truncated to their limits.
    """
    inputs = tokenizer([prefix + line for line in pairs["source"]], truncation=True, max_length=max_source)
    labels = tokenizer(text_target=list(pairs["target"]), truncation=True, max_length=max_target)
    return {"input_ids": inputs["input_ids"], "labels": labels["input_ids"]}


@dataclass(frozen=True)
class Collate:
    """Pad pairs into a batch; decoder inputs are the labels shifted right, as the model does it.

    Attributes:
        model: whose decoder inputs they are.
        pad: id of the padding token.
        multiple: lengths are rounded up to a multiple of it.
        lengths: of inputs and of labels, at least; 0 for those of the longest of a batch.
    """

    model: PreTrainedModel
    pad: int
    multiple: int = 1
    lengths: tuple[int, int] = (0, 0)

    def __call__(self, pairs: Sequence[Mapping]) -> dict[str, Tensor]:
        """The batch: input_ids and attention_mask [B, S]; with labels, also decoder_input_ids and labels [B, T]."""
        ids = self.padded([pair["input_ids"] for pair in pairs], self.pad, self.lengths[0])
        lengths = torch.tensor([len(pair["input_ids"]) for pair in pairs])
        batch = {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}
        if "labels" in pairs[0]:
            labels = self.padded([pair["labels"] for pair in pairs], IGNORED, self.lengths[1])
            batch |= {"decoder_input_ids": shifted(self.model, labels), "labels": labels}
        return batch

    def padded(self, rows: Sequence[Sequence[int]], value: int, least: int = 0) -> Tensor:
        """Rows of token ids as one tensor."""
        width = math.ceil(max(least, *map(len, rows)) / self.multiple) * self.multiple
        return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def shifted(model: PreTrainedModel, labels: Tensor) -> Tensor:
    """The decoder's inputs, [B, T] as the labels: these shifted right, as the model itself does it."""
    by_the_model = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if by_the_model is not None:
        return by_the_model(labels=labels)
    first, pad = model.config.decoder_start_token_id, model.config.pad_token_id  # M2M100 shifts so in its forward
    inputs = torch.cat([torch.full_like(labels[:, :1], first), labels[:, :-1]], dim=1)
    return inputs.masked_fill(inputs == IGNORED, pad)


def generate(model: PreTrainedModel, batch: Mapping[str, Tensor], **settings: Any) -> Tensor:
    """What a model makes of inputs, without sampling: token ids, [B, T].

    Args:
        model: one that generates; its class does not say so.
        batch: `input_ids` and `attention_mask`, on the model's device.
        **settings: of `generate`, such as `num_beams` and `max_length`.
    """
    return cast(Any, model).generate(**batch, do_sample=False, **settings)
