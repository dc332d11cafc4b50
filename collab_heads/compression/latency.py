"""Measure the time of a site on this machine, as it is and at smaller sizes, for the inputs that the user gives."""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.base.progress import progress_bar
from collab_heads.compression.measurements import Measurements
from collab_heads.compression.measures import SiteUse
from collab_heads.compression.parts.shape import UNCHANGED, Choice, Shape
from collab_heads.compression.parts.table import parts_of, resized
from collab_heads.model.apply_state import undone
from collab_heads.model.open_layers import OpenFeedForward, OpenLayers, OpenLayerSite, OpenSite
from collab_heads.running.batches import evaluating, run_batches

KNOTS = 4  # sizes of each part that are timed, or one more; times in between are interpolated
TURNS, TURNS_AGAIN = 3, 10  # for a table; and for the chosen sizes beside the original ones
ROUNDS, LEAST_SECONDS = 2, 0.01  # the least number of calls in a turn, and their least time


class Latencies:
    """The times of sites by their sizes: one table per shape and role, measured at construction.

    Args:
        measured: the measurements of the model, which is not changed; its first batch counts.
    """

    def __init__(self, measured: Measurements):
        self.tables: dict[tuple[Shape, str], Table] = {}
        different = {(measured.shapes[site.path], site.role): site for site in measured.sites}
        for (shape, role), site in progress_bar(different.items(), desc="timing sites"):
            self.tables[shape, role] = time_site(measured.layers, site, shape, measured.batch)

    def __call__(self, use: SiteUse, choice: Choice) -> float:
        """Return the seconds that a site takes in one forward pass."""
        return use.work.calls * self.tables[use.shape, use.role].seconds(use.shape, choice)


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
            timed[key] = time_choices(measured.layers, site, use.shape, pair, measured.batch, TURNS_AGAIN)
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


def knots(smaller: Sequence[int], whole: int) -> list[int]:
    """Return a few of the sizes, including the smallest, the largest and the whole one.

    No size lies between the largest and the whole one, where the class of the site changes, so no time is interpolated
    there.
    """
    every = -(-len(smaller) // (KNOTS - 1)) or 1
    return sorted({*smaller[::every], *smaller[-1:], whole})


def time_site(layers: OpenLayers, site: OpenLayerSite, shape: Shape, batch: Mapping) -> Table:
    """Time a site at all combinations of the `knots` of its parts."""
    parts = parts_of(shape)
    axes = [knots(part.sizes(shape), part.whole(shape)) for part in parts.values()]
    smaller = [
        [size if size < part.whole(shape) else None for size in axis]
        for part, axis in zip(parts.values(), axes, strict=True)
    ]
    choices = [Choice.of(**dict(zip(parts, each, strict=True))) for each in itertools.product(*smaller)]
    seconds = time_choices(layers, site, shape, choices, batch, TURNS)
    return Table(axes, np.array(seconds).reshape([len(axis) for axis in axes]))


def time_choices(
    layers: OpenLayers, site: OpenLayerSite, shape: Shape, choices: Sequence[Choice], batch: Mapping, turns: int
) -> list[float]:
    """Return the shortest time of a site with each choice, in seconds.

    The choices are timed in turns, so that a temporary disturbance of the machine affects all of them.
    """
    call, seconds = captured(layers.model, site, batch), [math.inf] * len(choices)
    with evaluating(layers.model):
        for _ in range(turns):
            for i, choice in enumerate(choices):
                with undone(layers, [site]) as tried:
                    now = resize(tried.at(site.path), shape, choice)
                    seconds[i] = min(seconds[i], best_seconds(partial(call, now)))
    return seconds


def captured(model: PreTrainedModel, site: OpenLayerSite, batch: Mapping) -> Callable[[Any], object]:
    """Return a function that repeats the first call of a site for a batch, including its output projection."""
    if isinstance(site, OpenFeedForward):
        return captured_block(model, site, batch)
    calls: list[tuple[tuple, dict[str, Any]]] = []
    heads: list[Tensor] = []
    hooks = (
        site.module.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True),
        site.output.register_forward_pre_hook(lambda _, args: heads.append(args[0])),
    )
    try:
        run_batches(model, [batch], {}, "timing")
    finally:
        for hook in hooks:
            hook.remove()
    args, kwargs = calls[0]
    kwargs |= {name: None for name in ("cache", "past_key_values") if name in kwargs}  # as transformers calls it
    is_inside = any(module is site.output for module in site.module.modules())

    def call(now: OpenSite) -> None:
        now.module(*args, **kwargs)
        if not is_inside:
            now.output(heads[0][..., : now.dim_value])

    return call


def captured_block(
    model: PreTrainedModel, block: OpenFeedForward, batch: Mapping
) -> Callable[[OpenFeedForward], object]:
    """Return a function that repeats the first call of a feed-forward block for a batch."""
    states: list[Tensor] = []
    handle = block.first[0].register_forward_pre_hook(lambda _, args: states.append(args[0]))
    try:
        run_batches(model, [batch], {}, "timing")
    finally:
        handle.remove()

    def call(now: OpenFeedForward) -> None:
        now.output(now.neurons(states[0]))

    return call


def resize(site: Any, shape: Shape, choice: Choice) -> Any:
    """Give a site the sizes of a choice, with arbitrary weights; return it as it is then."""
    state, geometry = site.state, resized(shape, choice)
    for part in parts_of(shape).values():
        state = part.resize(site, state, shape, geometry)
    return site.now(state)


def best_seconds(function: Callable[[], object]) -> float:
    """Return the shortest time of some calls in seconds, after one call to warm up."""
    function()
    times: list[float] = []
    while len(times) < ROUNDS or sum(times) < LEAST_SECONDS:
        started = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)
