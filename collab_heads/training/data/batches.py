"""Which examples each optimizer step takes: a function of the seed and the epoch alone.

So a resumed run sees what an unbroken one sees, and any number of processes shares out the same steps.
"""

import math
from collections.abc import Sequence

import torch

Step = list[list[int]]  # micro-batches of indices of examples

POOL = 20  # steps whose examples are sorted by length together


def shuffled_steps(
    num_examples: int, batch_size: int, batches: int, seed: int, epoch: int, lengths: Sequence[int] | None = None
) -> list[Step]:
    """Shuffle the examples of one epoch into optimizer steps.

    Args:
        num_examples: size of the training set.
        batch_size: of a micro-batch on one process.
        batches: micro-batches per step: processes times accumulation.
        seed: of the order.
        epoch: counted from 0; every epoch has an order of its own.
        lengths: of the examples, to put examples of like length into one step: less padding, a little less random.

    Returns:
        Steps of `batches` micro-batches; one can be smaller. Every example occurs once.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order, size = torch.randperm(num_examples, generator=generator).tolist(), batch_size * batches
    if lengths is None:
        return [chunked(chunk, batch_size) for chunk in chunked(order, size)]
    order = [i for pool in chunked(order, POOL * size) for i in sorted(pool, key=lambda i: -lengths[i])]
    steps = [chunked(chunk, batch_size) for chunk in chunked(order, size)]
    return [steps[i] for i in torch.randperm(len(steps), generator=generator).tolist()]


def token_steps(
    lengths: Sequence[int], max_tokens: int, batches: int, seed: int, epoch: int, *, pool: int = 100
) -> list[Step]:
    """Shuffle the examples of one epoch into optimizer steps whose micro-batches hold so many tokens, padding included.

    Args:
        lengths: of the examples: the longer of source and target.
        max_tokens: of a micro-batch on one process; an example that is longer is a micro-batch of its own.
        batches: micro-batches per step: processes times accumulation.
        seed: of the order.
        epoch: counted from 0; every epoch has an order of its own.
        pool: micro-batches' worth of examples that are sorted by length together.

    Returns:
        Steps of `batches` micro-batches; the last can have fewer. Every example occurs once.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    mean = max(1, sum(lengths) // max(1, len(lengths)))
    filled = []
    for part in chunked(order, max(1, pool * max_tokens // mean)):
        batch: list[int] = []
        for index in sorted(part, key=lambda i: -lengths[i]):  # the first of a batch is its longest
            if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
                filled.append(batch)
                batch = []
            batch.append(index)
        filled.append(batch)
    shuffled = [filled[i] for i in torch.randperm(len(filled), generator=generator).tolist()]
    return chunked(shuffled, batches)


def share_of_process(step: Step, rank: int, processes: int) -> Step:
    """The micro-batches of a step that one process takes: as many as every other, the last perhaps empty."""
    rounds = math.ceil(len(step) / processes)
    share = step[rank::processes]
    return share + [[]] * (rounds - len(share))


def longest_first(lengths: Sequence[int], batch_size: int) -> Step:
    """Batches for evaluation: examples of like length together, the longest first, so that memory fails early."""
    return chunked(sorted(range(len(lengths)), key=lambda i: -lengths[i]), batch_size)


def chunked(items: Sequence, size: int) -> list:
    """Consecutive pieces of a sequence."""
    return [items[start : start + size] for start in range(0, len(items), size)]
