"""Measuring tools of the GPU benchmark: a time budget, calls timed in turns, peak memory, batches that fit."""

import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

ROUNDS = (4, 16)  # at least, at most
SECONDS = 1.0  # of calls for each of the two models that are compared, within these rounds
RESERVE = 20.0  # seconds of the budget that are left for the end


class Budget:
    """A time budget that remembers the longest time of each sort of work."""

    def __init__(self, minutes: float):
        self.end = time.monotonic() + 60 * minutes - min(RESERVE, 30 * minutes)
        self.longest: dict[str, float] = {}

    def allows(self, work: str, guess: float) -> bool:
        """Return True if time is left for the longest work of this sort so far, or for `guess` if it is the first."""
        return time.monotonic() + self.longest.get(work, guess) < self.end

    @contextmanager
    def spending(self, work: str):
        """Remember how long the work in the context took."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.longest[work] = max(self.longest.get(work, 0.0), time.monotonic() - start)


@dataclass(frozen=True)
class Timing:
    """The times of a variant and of stock, in seconds per call.

    Attributes:
        seconds: median of the variant.
        stock: median of stock, in the same rounds.
        ratios: variant / stock, round by round.
    """

    seconds: float
    stock: float
    ratios: list[float]

    @property
    def ratio(self) -> float:
        """Return the median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def quartiles(self) -> str:
        """Return the first and third quartile of the ratios, as text."""
        low, _, high = statistics.quantiles(self.ratios, n=4)
        return f"{low:.3f} to {high:.3f}"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def in_turns(stock: Callable[[], object], variant: Callable[[], object], device: torch.device) -> Timing:
    """Time two calls in turns after two warm-ups each; the order alternates from round to round."""
    calls = (stock, variant)
    for call in calls:
        call()
    slowest = max(seconds_of(call, device) for call in calls)
    rounds = max(ROUNDS[0], min(ROUNDS[1], int(SECONDS / slowest)))
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds):
        for which in (0, 1) if index % 2 else (1, 0):
            times[which].append(seconds_of(calls[which], device))
    ratios = [mine / other for other, mine in zip(*times, strict=True)]
    return Timing(statistics.median(times[1]), statistics.median(times[0]), ratios)


def size_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes that a model and the state of its optimizer hold between calls."""
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values() if optimizer else ():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def peak_memory(call: Callable[[], object], held: int, device: torch.device) -> float | None:
    """Return the peak memory of a model in MiB: what it holds, and what a call adds on the device; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    synchronize(device)
    return (held + torch.cuda.max_memory_allocated(device) - before) / 2**20


def halved_until_it_fits(batch: int, measure: Callable[[int], object]):
    """Return the largest of batch, batch / 2, ... that fits into memory, and its measurement.

    Raises:
        torch.OutOfMemoryError: if not even one sequence fits.
    """
    while True:
        try:
            return batch, measure(batch)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
        # outside of the except block: the error holds the frames, and these the tensors
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        batch //= 2
