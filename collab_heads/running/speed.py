"""Time a portion of the batches before a work: how long passes of the model will take, and products on this machine."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from collab_heads.base.numerics import keeping_threads
from collab_heads.running.batches import evaluating, moved, run_batches
from collab_heads.running.portions import PORTION, portions, row_lengths, whole

TURNS = 3  # of which the quickest counts: the others had to wait for other work on the machine


def fused_operations(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object) -> int:
    """Count the multiplications and additions of fused attention on a CPU, which torch's counter leaves out."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


FUSED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: fused_operations}


def operation_counter() -> FlopCounterMode:
    """Return a context that counts the multiplications and additions of matrix products and convolutions."""
    return FlopCounterMode(display=False, custom_mapping=FUSED)


@dataclass(frozen=True)
class Speed:
    """The speed of a model on some batches.

    Attributes:
        positions: of all batches, without the padding at the end.
        rows: the examples of all batches.
        batches: their number.
        longest: the positions of the longest example.
        seconds: of a forward pass over all batches, in portions.
        product: seconds of a multiplication in a large matrix product, on all threads.
        product_alone: the same on one thread.
    """

    positions: int
    rows: int
    batches: int
    longest: int
    seconds: float
    product: float
    product_alone: float


def measure_speed(model: PreTrainedModel, batches: Sequence[Mapping]) -> Speed | None:
    """Time a portion from the middle of the batches; None for what cannot be divided into portions, or is no text.

    Args:
        model: the model, which runs in evaluation mode, without gradients.
        batches: input dicts as the model takes them.
    """
    has_two = model.config.is_encoder_decoder
    lengths = [row_lengths(batch, has_two) for batch in batches]
    known = [each for each in lengths if each is not None]
    if len(known) < len(lengths):
        return None
    middle = len(batches) // 2
    cut = list(portions(batches[middle], has_two))
    portion = moved(max(cut, key=lambda each: size_of(each, has_two)), model.device)
    counter = operation_counter()
    with evaluating(model), keeping_threads():
        with counter:
            run_batches(model, [portion], {}, "timing", cut=whole)  # the first pass is slower; it also checks
        threads = torch.get_num_threads()
        seconds = quickest(model, portion)
        alone = seconds
        if threads > 1:
            torch.set_num_threads(1)
            alone = quickest(model, portion)
    positions, operations = sum(int(each.sum()) for each in known), counter.get_total_flops() / 2
    share = positions / size_of(portion, has_two)
    return Speed(
        *(positions, sum(map(len, known)), len(batches), max(int(each.max()) for each in known)),
        *(seconds * share, seconds / operations, alone / operations),
    )


def quickest(model: PreTrainedModel, portion: Mapping) -> float:
    """Return the seconds of the quickest of some passes."""
    found = []
    for _ in range(TURNS):
        started = time.perf_counter()
        model(**portion)
        found.append(time.perf_counter() - started)
    return min(found)


def size_of(batch: Mapping, is_encoder_decoder: bool) -> int:
    """Return the positions of a batch, without the padding at the end."""
    lengths = row_lengths(batch, is_encoder_decoder)
    return PORTION if lengths is None else int(lengths.sum())
