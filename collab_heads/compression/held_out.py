"""Keep some calibration examples away from every fit, so that errors are measured on what no fit has seen."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from collab_heads.errors import CalibrationError
from collab_heads.model.batches import each_batch

EVERY = 8  # one example of so many is held out


def hold_out(batches: Iterable[Mapping]) -> tuple[list[Mapping], list[Mapping]]:
    """Divide calibration batches into examples to fit to and examples to measure on.

    Batches whose tensors do not all have one row per example are kept whole.

    Args:
        batches: input dicts as the model takes them.

    Returns:
        Both as batches. A single example, or a single batch that cannot be divided, is in both.

    Raises:
        CalibrationError: if there are no batches, or they are no dicts.
    """
    fitted: list[Mapping] = []
    held: list[Mapping] = []
    seen = 0
    for batch in each_batch(batches):
        count = rows(batch)
        if count == 0:
            raise CalibrationError("a calibration batch holds no examples: leave it out")
        if count is None:
            (held if seen % EVERY == EVERY - 1 else fitted).append(batch)
            seen += 1
            continue
        numbers = torch.arange(seen, seen + count)
        is_held = numbers % EVERY == EVERY - 1
        for part, chosen in ((fitted, ~is_held), (held, is_held)):
            if chosen.any():
                part.append({name: taken(value, chosen) for name, value in batch.items()})
        seen += count
    if held:
        return fitted, held
    first, count = fitted[-1], rows(fitted[-1])
    if count is not None and count > 1:  # fewer than EVERY examples in all: the last one
        last = torch.arange(count) == count - 1
        rest = {name: taken(value, ~last) for name, value in first.items()}
        return [*fitted[:-1], rest], [{name: taken(value, last) for name, value in first.items()}]
    return (fitted[:-1], fitted[-1:]) if len(fitted) > 1 else (fitted, fitted)


def rows(batch: Mapping) -> int | None:
    """How many examples a batch holds; None if its tensors do not say."""
    counts = {len(value) if value.ndim else None for value in batch.values() if isinstance(value, Tensor)}
    others = [value for value in batch.values() if not isinstance(value, Tensor | int | float | str | None)]
    return None if len(counts) != 1 or others else counts.pop()


def taken(value: object, chosen: Tensor) -> object:
    """The chosen rows of a tensor, [B] bool; what is no tensor is the same for all."""
    return value[chosen.to(value.device)] if isinstance(value, Tensor) else value
