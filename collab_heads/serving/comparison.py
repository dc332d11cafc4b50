"""Run an exported model and its original on the same inputs: how far their outputs differ, and the time of both."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collab_heads.base.progress import progress_bar
from collab_heads.model.batches import output_mask
from collab_heads.serving.example_inputs import first_row, padded, without_labels

NEW_TOKENS, ROUNDS = 8, 5


class Comparison(NamedTuple):
    """The differences of an exported model from its original; the numbers are those of `ExportReport`."""

    difference: float
    agreeing: float | None
    seconds_before: float
    seconds_after: float


@torch.no_grad()
def compare(model: Any, served: Any, batches: Sequence[Mapping], *, generates: bool) -> Comparison:
    """Compare an exported model with its original on some batches; the first one is timed.

    Its first row is compared alone, too, and all of it with padding: a graph may have taken the number of rows for a
    constant, or have no mask.
    """
    largest, scale, same, count = 0.0, 0.0, 0, 0
    compared = [*batches, first_row(batches[0]), padded(model, batches[0])]
    for batch in progress_bar(compared, desc="comparing"):
        inputs = without_labels(batch)
        if generates:
            gap, size, agreed, chosen = compare_generation(model, served, source_of(model, inputs))
            same, count = same + agreed, count + chosen
        else:
            gap, size = compare_outputs(model, inputs, model(**inputs), served(**inputs))
        largest, scale = max(largest, gap), max(scale, size)
    first = without_labels(batches[0])
    run = greedy if generates else call
    before, after = in_turns(
        [partial(run, each, source_of(model, first) if generates else first) for each in (model, served)]
    )
    return Comparison(largest / (scale or 1.0), same / count if count else None, before, after)


def compare_outputs(model: Any, inputs: Mapping, expected: Mapping, found: Mapping) -> tuple[float, float]:
    """Return the largest difference of the tensors in two outputs, and the largest value; padding does not count."""
    gap, size = 0.0, 0.0
    for name, tensor in expected.items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and isinstance(found.get(name), Tensor):
            a, b = tensor.float(), found[name].float()
            mask = output_mask(model, inputs) if a.ndim == 3 and name in ("logits", "last_hidden_state") else None
            if mask is not None:
                a, b = a[mask], b[mask]
            gap, size = max(gap, float((a - b).abs().max())), max(size, float(a.abs().max()))
    return gap, size


def compare_generation(model: Any, served: Any, inputs: Mapping) -> tuple[float, float, int, int]:
    """Compare greedy decoding: the largest difference of logits, the largest logit, equal tokens and all tokens.

    Logits of a row count until both have chosen different tokens.
    """
    a, b = (greedy(each, inputs) for each in (model, served))
    start = a.sequences.shape[1] - len(a.logits)
    alike = torch.ones(len(a.sequences), dtype=torch.bool)
    gap, size, same = 0.0, 0.0, 0
    for step, (one, other) in enumerate(zip(a.logits, b.logits, strict=True)):
        if alike.any():
            gap = max(gap, float((one[alike] - other[alike]).abs().max()))
            size = max(size, float(one[alike].abs().max()))
        equal = a.sequences[:, start + step] == b.sequences[:, start + step]
        same, alike = same + int(equal.sum()), alike & equal
    return gap, size, same, len(a.sequences) * len(a.logits)


def greedy(model: Any, inputs: Mapping) -> Any:
    """Decode some tokens greedily; the logits of every step come along."""
    return model.generate(
        **inputs,
        do_sample=False,
        num_beams=1,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )


def call(model: Any, inputs: Mapping) -> Any:
    """Run a model on a batch."""
    return model(**inputs)


def source_of(model: Any, inputs: Mapping) -> dict[str, Any]:
    """Return the inputs that a model generates from: without the text that the decoder would read."""
    return {name: value for name, value in inputs.items() if not name.startswith("decoder_")}


def in_turns(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Return the median seconds of some calls, made in turns, with one thread of PyTorch."""
    threads, seconds = torch.get_num_threads(), [[0.0] * ROUNDS for _ in calls]
    torch.set_num_threads(1)
    try:
        for turn in progress_bar(range(-1, ROUNDS), desc="timing"):
            for number, call in enumerate(calls):
                started = time.perf_counter()
                call()
                seconds[number][max(turn, 0)] = time.perf_counter() - started
    finally:
        torch.set_num_threads(threads)
    return [statistics.median(each) for each in seconds]
