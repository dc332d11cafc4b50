"""Make example inputs for a model, from its config, and take batches of texts apart."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from collab_heads.errors import ArgumentError
from collab_heads.layers.attention import CACHE

ROWS, TOKENS, LEFT_OUT = 2, 12, 4  # of texts; the second is shorter
IMAGE, SAMPLES = 224, 16_000  # pixels a side, if the config says nothing; samples of sound


def example_inputs(model: PreTrainedModel, seed: int = 0) -> dict[str, Tensor]:
    """Return a batch that a model takes, of two rows: random tokens, with padding, pixels or sound.

    Raises:
        ArgumentError: if the model takes something else.
    """
    generator = torch.Generator().manual_seed(seed)
    config, found = model.config, dict[str, Tensor]()
    names = {*inspect.signature(model.forward).parameters, model.main_input_name}
    text, image = (getattr(config, name, None) or config for name in ("text_config", "vision_config"))
    if "input_ids" in names and hasattr(text, "vocab_size"):
        special = {getattr(text, f"{name}_token_id", None) for name in ("pad", "eos", "bos", "decoder_start")}
        usual = [token for token in range(text.vocab_size) if token not in special]
        chosen = torch.randint(len(usual), (ROWS, TOKENS), generator=generator)
        found["input_ids"] = torch.tensor(usual)[chosen]
        found["attention_mask"] = torch.ones(ROWS, TOKENS, dtype=torch.long)
        found = padded(model, found)
        if "token_type_ids" in names and getattr(text, "type_vocab_size", 0) > 1:
            found["token_type_ids"] = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    if "pixel_values" in names:
        size = getattr(image, "image_size", None) or IMAGE
        sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
        found["pixel_values"] = torch.randn(ROWS, getattr(image, "num_channels", 3), *sides, generator=generator)
    if model.main_input_name == "input_values":
        found = {"input_values": torch.randn(ROWS, SAMPLES, generator=generator)}
    if model.main_input_name == "input_features":
        length = 2 * config.max_source_positions
        found = {"input_features": torch.randn(ROWS, config.num_mel_bins, length, generator=generator)}
    if not found:
        raise ArgumentError(
            f"{type(model).__name__} takes {model.main_input_name}, of which no examples can be made: pass batches"
        )
    return found


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch without labels, and without what it does not give (None)."""
    return {name: value for name, value in batch.items() if "label" not in name and value is not None}


def two_rows(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch of at least two rows, without labels: an exporter takes a size of one for a constant."""
    return {
        name: torch.cat([value, value]) if isinstance(value, Tensor) and value.ndim and len(value) == 1 else value
        for name, value in without_labels(batch).items()
    }


def padded(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch of texts of one length, or without a mask, with padding in the second row; others as they were.

    An exporter leaves a mask out that hides nothing, and the graph reads padding as text.
    """
    mask = batch.get("attention_mask")
    if mask is None and "input_ids" in batch and "attention_mask" in inspect.signature(model.forward).parameters:
        mask = torch.ones_like(batch["input_ids"])
    if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) < 2 or not mask.all() or mask.shape[1] < 2:
        return dict(batch)
    is_left = model.can_generate() and not model.config.is_encoder_decoder  # they continue what stands last
    hidden, count = mask.clone(), min(LEFT_OUT, mask.shape[1] // 2)
    hidden[1, slice(count) if is_left else slice(-count, None)] = 0
    return {**batch, "attention_mask": hidden}


def first_row(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first row of a batch."""
    return {name: value[:1] if isinstance(value, Tensor) and value.ndim else value for name, value in batch.items()}


def ids(row: Mapping, name: str = "input_ids") -> list[int]:
    """Return the ids of a row."""
    return row[name][0].tolist()


def check_ids(name: str, numbers: Tensor, size: int, what: str) -> None:
    """Raise ArgumentError if a number is not from 0 to size - 1: engines read beside their tables then.

    Args:
        name: of the numbers.
        numbers: of any shape.
        size: of the table that they are looked up in.
        what: its rows are.
    """
    wrong = numbers[(numbers < 0) | (numbers >= size)]
    if wrong.numel():
        raise ArgumentError(f"{name} hold {int(wrong[0])}: the model has {size} {what}")


def rows_of(inputs: Mapping) -> Iterator[dict[str, Tensor]]:
    """Yield the rows of a batch as batches of one, without their padding."""
    for index in range(len(inputs["input_ids"])):
        mask = inputs["attention_mask"][index].bool() if "attention_mask" in inputs else slice(None)
        found = {name: inputs[name][index][mask][None] for name in ("input_ids", "token_type_ids") if name in inputs}
        if found["input_ids"].numel():
            yield found | {"attention_mask": torch.ones_like(found["input_ids"])}


class WholeCache(DynamicCache):
    """A cache that no window cuts, of a class that only transformers' exporters register.

    transformers' recipes for ExecuTorch register `DynamicCache` in another form for all later exports of the process.
    """


def whole_cache(model: PreTrainedModel) -> dict[str, DynamicCache]:
    """Return an empty cache as an input of a decoder; other models make their own."""
    return {} if model.config.is_encoder_decoder else {CACHE: WholeCache()}
