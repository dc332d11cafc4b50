"""The batches of a distillation: listed, checked, and a part of them held out."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.errors import CalibrationError, CollabHeadsError
from collab_heads.model.batches import each_batch
from collab_heads.model.masks import token_masks
from collab_heads.model.portions import IGNORED

HELD_OUT = 8  # one batch of so many is held out
MOST_HELD_OUT = 16  # batches: more take time at every evaluation and say no more
Batch = dict[str, Any]
Part = list[tuple[int, Batch]]  # batches with their numbers


def list_batches(model: PreTrainedModel, batches: Iterable[Mapping]) -> list[Batch]:
    """List batches, without labels that no decoder reads.

    Raises:
        CalibrationError: if there are none, one is no dict or holds no tokens, or they cannot be read; it is numbered.
    """
    listed: list[Batch] = []
    try:
        for batch in each_batch(batches):
            listed.append(without_unread_labels(model, batch))
    except CollabHeadsError:
        raise
    except Exception as error:  # whatever a data loader raises
        raise CalibrationError(f"batch {len(listed)} cannot be read: {type(error).__name__}: {error}") from error
    for index, batch in enumerate(listed):
        check_tokens(model, index, batch)
    return listed


def without_unread_labels(model: PreTrainedModel, batch: Mapping) -> Batch:
    """A batch without its labels, unless they are what a decoder reads, and without gradients of its own."""
    kept = {name: fit_for_training(value) if isinstance(value, Tensor) else value for name, value in batch.items()}
    reads = model.config.is_encoder_decoder and not has_decoder_inputs(batch) and has_text_labels(batch)
    if not reads:
        kept.pop("labels", None)
    return kept


def fit_for_training(tensor: Tensor) -> Tensor:
    """A tensor without a gradient, also where it was made in inference mode (outputs of an encoder may be either)."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def has_decoder_inputs(batch: Mapping) -> bool:
    """Whether a batch says what the decoder reads."""
    return any(batch.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))


def has_text_labels(batch: Mapping) -> bool:
    """Whether the labels of a batch are tokens: [B, T]."""
    labels = batch.get("labels")
    return isinstance(labels, Tensor) and labels.ndim == 2 and not labels.is_floating_point()


def check_tokens(model: PreTrainedModel, index: int, batch: Batch) -> None:
    """Raise CalibrationError if a batch has no rows, or nothing in it counts."""
    tensors = [value for value in batch.values() if isinstance(value, Tensor)]
    if not tensors:
        raise CalibrationError(f"batch {index} holds no tensors but {sorted(batch)}: pass return_tensors='pt'")
    try:
        masks = token_masks(model, batch)
    except Exception as error:
        names = sorted(batch)
        raise CalibrationError(f"{type(model).__name__} cannot take batch {index} with {names}: {error}") from error
    nothing = any(mask is not None and not mask.any() for mask in masks.values())
    if has_text_labels(batch):
        nothing |= not bool((batch["labels"] != IGNORED).any())
    if nothing or any(not tensor.numel() for tensor in tensors):
        raise CalibrationError(f"batch {index} holds no tokens: leave it out")


def num_examples(steps: int, size: int) -> int:
    """How many examples a distillation can use: a batch of so many for every step, and those held out."""
    return size * max(steps + math.ceil(steps / (HELD_OUT - 1)), HELD_OUT)


def split(batches: Sequence[Batch]) -> tuple[Part, Part]:
    """Divide batches into those to train on and those that are held out, with their numbers.

    Of eight batches or more every eighth is held out, at most about 16 in all; of fewer an eighth of the rows of each,
    one at least. Where every batch is a single row the last one is; where there is but one it is both.
    """
    every_one = list(enumerate(batches))
    if len(batches) >= HELD_OUT:
        every = max(HELD_OUT, len(batches) // MOST_HELD_OUT)
        return [each for each in every_one if (each[0] + 1) % every], every_one[every - 1 :: every]
    parts = [(number, *split_rows(batch)) for number, batch in every_one]
    held_out = [(number, held) for number, _, held in parts if held is not None]
    if held_out:
        return [(number, train) for number, train, _ in parts], held_out
    return every_one[:-1] or every_one, every_one[-1:]


def split_rows(batch: Batch) -> tuple[Batch, Batch | None]:
    """The rows of a batch to train on, and those held out; None where it cannot be divided."""
    rows = num_rows(batch)
    if rows is None or rows < 2:
        return batch, None
    count = rows - max(1, rows // HELD_OUT)
    return select(batch, slice(count)), select(batch, slice(count, rows))


def num_rows(batch: Mapping) -> int | None:
    """How many examples a batch holds, None where its tensors disagree."""
    counts = {len(value) if value.ndim else 0 for value in batch.values() if isinstance(value, Tensor)}
    simple = all(isinstance(value, Tensor | int | float | str | None) for value in batch.values())
    return counts.pop() if len(counts) == 1 and simple else None


def select(batch: Mapping, rows: slice) -> Batch:
    """Some rows of a batch."""
    return {name: value[rows] if isinstance(value, Tensor) else value for name, value in batch.items()}


def in_order(count: int, seed: int, steps: int) -> list[int]:
    """Which of `count` batches each step takes; every epoch has an order of its own."""
    places: list[int] = []
    generator = torch.Generator().manual_seed(seed)
    while len(places) < steps:
        places += torch.randperm(count, generator=generator).tolist()
    return places[:steps]


def moved(batch: Mapping, device: torch.device) -> Batch:
    """A batch on a device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
