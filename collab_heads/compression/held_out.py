"""Keep some calibration examples away from every fit, so that errors are measured on what no fit has seen."""

from collections.abc import Iterable, Mapping

import torch

from collab_heads.errors import CalibrationError
from collab_heads.model.batches import each_batch
from collab_heads.model.examples import num_rows, select

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
        count = num_rows(batch)
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
                part.append(select(batch, chosen))
        seen += count
    if held:
        return fitted, held
    first, count = fitted[-1], num_rows(fitted[-1])
    if count is not None and count > 1:  # fewer than EVERY examples in all: the last one
        last = torch.arange(count) == count - 1
        rest = select(first, ~last)
        return [*fitted[:-1], rest], [select(first, last)]
    return (fitted[:-1], fitted[-1:]) if len(fitted) > 1 else (fitted, fitted)
