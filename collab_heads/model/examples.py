"""Batches and their examples: what is in them, some of their rows, and labels that nothing reads."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, device
from transformers import PreTrainedModel

Batch = dict[str, Any]
Part = list[tuple[int, Batch]]  # batches with their numbers


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


def num_rows(batch: Mapping) -> int | None:
    """How many examples a batch holds, None where its tensors disagree."""
    counts = {len(value) if value.ndim else 0 for value in batch.values() if isinstance(value, Tensor)}
    simple = all(isinstance(value, Tensor | int | float | str | None) for value in batch.values())
    return counts.pop() if len(counts) == 1 and simple else None


def select(batch: Mapping, rows: slice | Tensor) -> Batch:
    """Some rows of a batch, a slice or [B] bool; what is no tensor is the same for all."""

    def part(value: Tensor) -> Tensor:
        return value[rows.to(value.device) if isinstance(rows, Tensor) else rows]

    return {name: part(value) if isinstance(value, Tensor) else value for name, value in batch.items()}


def moved(batch: Mapping, device: device) -> Batch:
    """A batch on a device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
