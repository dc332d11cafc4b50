"""Measure the time of a site on this machine, as it is and at smaller sizes, for the inputs that the user gives.

It is that of PyTorch, or of an engine, with the operators that `export` writes for it.
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as tree
from transformers import PreTrainedModel

from collab_heads.base.progress import progress_bar
from collab_heads.compression.measurements import Measurements
from collab_heads.compression.measures import SiteUse
from collab_heads.compression.parts.shape import UNCHANGED, Choice, Shape
from collab_heads.compression.parts.table import parts_of, resized
from collab_heads.model.apply_state import undone
from collab_heads.model.open_layers import OpenFeedForward, OpenLayerSite
from collab_heads.running.batches import evaluating, run_batches
from collab_heads.serving.part_in_engine import empty_run, in_engine

KNOTS = 4  # sizes of each part that are timed, or one more; times in between are interpolated
KNOTS_IN_ENGINE = 2  # likewise: a graph is made for each, which takes a second
TURNS, TURNS_AGAIN = 3, 10  # for a table; and for the chosen sizes beside the original ones
ROUNDS, LEAST_SECONDS = 2, 0.01  # the least number of calls in a turn, and their least time


class Latencies:
    """The times of sites by their sizes: one table per shape, role and bits, measured at construction.

    Args:
        measured: the measurements of the model, which is not changed; its first batch counts.
    """

    def __init__(self, measured: Measurements):
        self.tables: dict[tuple[Shape, str, int | None], Table] = {}
        different = {(measured.shapes[site.path], site.role): site for site in measured.sites}
        for (shape, role), site in progress_bar(different.items(), desc="timing sites"):
            self.tables |= {(shape, role, bits): table for bits, table in time_site(measured, site, shape).items()}

    def __call__(self, use: SiteUse, choice: Choice) -> float:
        """Return the seconds that a site takes in one forward pass."""
        return use.work.calls * self.tables[use.shape, use.role, choice.bits].seconds(use.shape, choice)


def timed_again(measured: Measurements, choices: Mapping[str, Choice]) -> tuple[float, float]:
    """Time sites again as they are and as chosen, in turns.

    The choices were made by the smallest of a table's many times, which are smallest partly by chance.

    Args:
        measured: the measurements of the model.
        choices: path -> choice for the site.

    Returns:
        Seconds of all sites in one forward pass, before and after.
    """
    timed: dict[tuple[Shape, str, Choice], list[float]] = {}
    before, after, uses = 0.0, 0.0, measured.uses
    for site in progress_bar(measured.sites, desc="timing what was chosen"):
        use, choice = uses[site.path], choices[site.path]
        key = use.shape, use.role, choice
        if key not in timed:
            pair = [UNCHANGED, choice] if choice != UNCHANGED else [choice]
            timed[key] = time_choices(measured, site, use.shape, pair, TURNS_AGAIN)
        before, after = before + use.work.calls * timed[key][0], after + use.work.calls * timed[key][-1]
    return before, after


class Table:
    """The times of a site in seconds, at some sizes of each part.

    Args:
        axes: the sizes of each part that were timed, ascending.
        seconds: their times, an array with one axis per part.
    """

    def __init__(self, axes: Sequence[Sequence[int]], seconds: np.ndarray):
        self.axes, self.times = axes, seconds

    def seconds(self, shape: Shape, choice: Choice) -> float:
        """Return the time of a choice in seconds, interpolated linearly between the measured sizes."""
        times, sizes = self.times, (part.size(shape, choice) for part in parts_of(shape).values())
        for axis, size in zip(self.axes, sizes, strict=True):
            place = np.interp(size, axis, range(len(axis)))
            low, high = math.floor(place), math.ceil(place)
            times = times[low] + (place - low) * (times[high] - times[low])
        return float(times)


def knots(smaller: Sequence[int], whole: int, count: int = KNOTS) -> list[int]:
    """Return a few of the sizes, including the smallest, the smallest above 0, the largest and the whole one.

    No size lies between the largest and the whole one, where the class of the site changes, or between 0 and the next,
    so no time is interpolated there.
    """
    every = -(-len(smaller) // (count - 1)) or 1
    return sorted({*smaller[::every], *smaller[: 2 if smaller[:1] == [0] else 1], *smaller[-1:], whole})


def time_site(measured: Measurements, site: OpenLayerSite, shape: Shape) -> dict[int | None, Table]:
    """Time a site at all combinations of the `knots` of its parts: bits, or None for float -> table."""
    parts, count = parts_of(shape), KNOTS if measured.options.engine == "torch" else KNOTS_IN_ENGINE
    axes = [knots(part.sizes(shape), part.whole(shape), count) for part in parts.values()]
    smaller = [
        [size if size < part.whole(shape) else None for size in axis]
        for part, axis in zip(parts.values(), axes, strict=True)
    ]
    sizes = [Choice.of(**dict(zip(parts, each, strict=True))) for each in itertools.product(*smaller)]
    every = {bits: [with_bits(each, bits) for each in sizes] for bits in (None, *shape.bits)}
    different = list(dict.fromkeys(choice for each in every.values() for choice in each))
    seconds = dict(zip(different, time_choices(measured, site, shape, different, TURNS), strict=True))
    lengths = [len(axis) for axis in axes]
    return {
        bits: Table(axes, np.array([seconds[choice] for choice in each]).reshape(lengths))
        for bits, each in every.items()
    }


def with_bits(choice: Choice, bits: int | None) -> Choice:
    """Return a choice with bits; of a site without heads or neurons, nothing else counts."""
    none = tuple(each for each in choice.sizes if not each[1])
    return Choice(none) if none else replace(choice, bits=bits)


def time_choices(
    measured: Measurements, site: OpenLayerSite, shape: Shape, choices: Sequence[Choice], turns: int
) -> list[float]:
    """Return the shortest time of a site with each choice, in seconds.

    The choices are timed in turns, so that a temporary disturbance of the machine affects all of them.
    """
    with evaluating(measured.model):
        timers, seconds = timers_of(measured, site, shape, choices), dict.fromkeys(choices, math.inf)
        for _ in range(turns):
            for choice in choices:
                seconds[choice] = min(seconds[choice], timers[choice]())
    return [seconds[choice] for choice in choices]


def timers_of(
    measured: Measurements, site: OpenLayerSite, shape: Shape, choices: Sequence[Choice]
) -> dict[Choice, Callable[[], float]]:
    """Return for each choice what times the site with it: a turn, in seconds."""
    layers, engine = measured.layers, measured.options.engine
    call = SiteCall.captured(layers.model, site, measured.batch)

    def in_torch(choice: Choice) -> float:
        with undone(layers, [site]) as tried:
            now = resize(tried.at(site.path), shape, choice)
            return best_seconds(partial(call, now, *call.inputs(now)))

    if engine == "torch":
        return {choice: partial(in_torch, choice) for choice in choices}
    timers: dict[Choice, Callable[[], float]] = {}
    call_alone = best_seconds(empty_run(engine))  # a whole model is one call
    for sizes in dict.fromkeys(choice.in_float for choice in choices):
        alike = [choice for choice in choices if choice.in_float == sizes]
        if any(size == 0 for _, size in sizes.sizes):  # constants, which engines do not compute
            timers |= dict.fromkeys(alike, float)
            continue
        with undone(layers, [site]) as tried:
            now = resize(tried.at(site.path), shape, sizes)
            bits = [choice.bits for choice in alike]
            graphs = in_engine(engine, partial(call, now), now.modules, call.inputs(now), bits)
        for choice, graph in zip(alike, graphs, strict=True):
            timers[choice] = lambda graph=graph: max(best_seconds(graph) - call_alone, 0.0)  # type: ignore[misc]
    return timers


@dataclass(frozen=True)
class SiteCall:
    """The first call of a site for a batch, to be repeated at other sizes, including its output projection.

    Attributes:
        leaves, spec: the arguments of the site's module, flattened; of a feed-forward block the states.
        heads: what the output projection of attention reads, where it is outside of the module.
    """

    leaves: Sequence[Any]
    spec: Any
    heads: Tensor | None = None

    @classmethod
    def captured(cls, model: PreTrainedModel, site: OpenLayerSite, batch: Mapping) -> "SiteCall":
        """Run a model on a batch, and keep the first call of a site."""
        module = site.first[0] if isinstance(site, OpenFeedForward) else site.module
        calls: list[tuple[tuple, dict[str, Any]]] = []
        heads: list[Tensor] = []
        hooks = (
            module.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True),
            site.output.register_forward_pre_hook(lambda _, args: heads.append(args[0])),
        )
        try:
            run_batches(model, [batch], {}, "timing")
        finally:
            for hook in hooks:
                hook.remove()
        args, kwargs = calls[0]
        kwargs |= {name: None for name in ("cache", "past_key_values") if name in kwargs}  # as transformers calls it
        leaves, spec = tree.tree_flatten((args, kwargs))
        is_whole = isinstance(site, OpenFeedForward) or any(each is site.output for each in module.modules())
        return cls(leaves, spec, None if is_whole else heads[0])

    def inputs(self, now: Any) -> list[Tensor]:
        """Return the tensors that a site reads with its present sizes."""
        given = [each for each in self.leaves if isinstance(each, Tensor)]
        return given if self.heads is None else [*given, self.heads[..., : now.dim_value].contiguous()]

    def __call__(self, now: Any, *inputs: Tensor) -> Any:
        """Call a site, as it is now, with such tensors; return tensors."""
        rest = iter(inputs)
        leaves = [next(rest) if isinstance(each, Tensor) else each for each in self.leaves]
        args, kwargs = tree.tree_unflatten(leaves, self.spec)
        if isinstance(now, OpenFeedForward):
            return now.output(now.neurons(args[0]))
        found = now.module(*args, **kwargs)
        mixed = found[0] if isinstance(found, tuple) else found
        return mixed if self.heads is None else (mixed, now.output(next(rest)))


def resize(site: Any, shape: Shape, choice: Choice) -> Any:
    """Give a site the sizes of a choice, with arbitrary weights; return it as it is then."""
    state, geometry = site.state, resized(shape, choice)
    for part in parts_of(shape).values():
        state = part.resize(site, state, shape, geometry)
    return site.now(state)


def best_seconds(function: Callable[[], object]) -> float:
    """Return the shortest time of some calls in seconds, after one call to warm up.

    On one thread it is the processor's time, which other processes disturb less.
    """
    function()
    has_gpu, times = torch.cuda.is_available(), list[float]()
    clock = time.process_time if torch.get_num_threads() == 1 and not has_gpu else time.perf_counter
    while len(times) < ROUNDS or sum(times) < LEAST_SECONDS:
        started = clock()
        function()
        if has_gpu:
            torch.cuda.synchronize()
        times.append(clock() - started)
    return min(times)
