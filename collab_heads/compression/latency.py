"""How long a site takes on this machine, as it is and as it would be, for the inputs that the user gives."""

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

from collab_heads.base.display import progress_bar
from collab_heads.compression.measures import SiteUse
from collab_heads.compression.parts.shape import UNCHANGED, Choice, SiteShape
from collab_heads.compression.parts.table import PARTS, resized
from collab_heads.model.apply_state import undone
from collab_heads.model.batches import evaluating, run_batches
from collab_heads.model.open_site import OpenSite, reopened
from collab_heads.sites.record import CollabConfig
from collab_heads.sites.site import Role

KNOTS = 4  # sizes of each part that are timed, or one more; between them times are interpolated
TURNS, TURNS_AGAIN = 3, 10  # of a table; and of what was chosen beside what was there
ROUNDS, LEAST_SECONDS = 2, 0.01  # calls in a turn, at least


class Latencies:
    """Seconds of a site by what it has: a table for every shape of site, measured when it is made.

    Args:
        model: it is left as it was.
        sites: those that may change.
        shapes: path -> shape.
        batch: input as the model takes it, of the size that matters to the user.
    """

    def __init__(
        self, model: PreTrainedModel, sites: Sequence[OpenSite], shapes: Mapping[str, SiteShape], batch: Mapping
    ):
        self.model, self.sites, self.batch = model, sites, batch
        self.tables: dict[tuple[SiteShape, Role], Table] = {}
        different = {(shapes[site.path], site.role): site for site in sites}
        for (shape, role), site in progress_bar(different.items(), desc="timing sites", leave=False):
            self.tables[shape, role] = time_site(model, site, shape, batch)

    def __call__(self, use: SiteUse, choice: Choice) -> float:
        """Seconds that a site takes in one forward pass."""
        return use.work.calls * self.tables[use.shape, use.role].seconds(use.shape, choice)

    def again(self, uses: Mapping[str, SiteUse], choices: Mapping[str, Choice]) -> tuple[float, float]:
        """Time sites as they are and as chosen, in turns: the least of a table's many times is least by chance, too.

        Args:
            uses: path -> use.
            choices: path -> choice.

        Returns:
            Seconds of all sites in one forward pass, before and after.
        """
        timed: dict[tuple[SiteShape, Role, Choice], list[float]] = {}
        before = after = 0.0
        for site in progress_bar(self.sites, desc="timing what was chosen", leave=False):
            use, choice = uses[site.path], choices[site.path]
            key = use.shape, use.role, choice
            if key not in timed:
                pair = [UNCHANGED, choice] if choice != UNCHANGED else [choice]
                timed[key] = time_choices(self.model, site, use.shape, pair, self.batch, TURNS_AGAIN)
            before, after = before + use.work.calls * timed[key][0], after + use.work.calls * timed[key][-1]
        return before, after


class Table:
    """Seconds at some sizes of heads, queries and keys, and values.

    Args:
        axes: the sizes that were timed, of each part, ascending.
        seconds: their times, an array with an axis for each part.
    """

    def __init__(self, axes: Sequence[Sequence[int]], seconds: np.ndarray):
        self.axes, self.times = axes, seconds

    def seconds(self, shape: SiteShape, choice: Choice) -> float:
        """The time of a choice, linear between those that were measured."""
        times = self.times
        for axis, size in zip(self.axes, (part.size(shape, choice) for part in PARTS.values()), strict=True):
            place = np.interp(size, axis, range(len(axis)))
            low, high = math.floor(place), math.ceil(place)
            times = times[low] + (place - low) * (times[high] - times[low])
        return float(times)


def knots(smaller: Sequence[int], whole: int) -> list[int]:
    """A few of the sizes: the smallest, the largest and the whole one among them.

    Between the largest and the whole one nothing is interpolated: there the site changes its class.
    """
    every = -(-len(smaller) // (KNOTS - 1)) or 1
    return sorted({*smaller[::every], *smaller[-1:], whole})


def time_site(model: PreTrainedModel, site: OpenSite, shape: SiteShape, batch: Mapping) -> Table:
    """Time a site at all combinations of some sizes."""
    axes = [knots(part.sizes(shape), part.whole(shape)) for part in PARTS.values()]
    smaller = [
        [size if size < part.whole(shape) else None for size in axis]
        for part, axis in zip(PARTS.values(), axes, strict=True)
    ]
    choices = [Choice.of(**dict(zip(PARTS, each, strict=True))) for each in itertools.product(*smaller)]
    seconds = time_choices(model, site, shape, choices, batch, TURNS)
    return Table(axes, np.array(seconds).reshape([len(axis) for axis in axes]))


def time_choices(
    model: PreTrainedModel, site: OpenSite, shape: SiteShape, choices: Sequence[Choice], batch: Mapping, turns: int
) -> list[float]:
    """The shortest of some calls of a site at some sizes, in turns: what disturbs the machine for a while hits all."""
    call, seconds = captured(model, site, batch), [math.inf] * len(choices)
    with evaluating(model):
        for _ in range(turns):
            for i, choice in enumerate(choices):
                with undone(model, [site]):
                    resize(reopened(site), shape, choice)
                    now = reopened(site)
                    seconds[i] = min(seconds[i], best_seconds(partial(call, now)))
    return seconds


def captured(model: PreTrainedModel, site: OpenSite, batch: Mapping) -> Callable[[OpenSite], object]:
    """What repeats the first call that a site gets for a batch, its output projection included."""
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
    kwargs = {**kwargs, "past_key_values": None} if "past_key_values" in kwargs else kwargs
    is_inside = any(module is site.output for module in site.module.modules())

    def call(now: OpenSite) -> None:
        now.module(*args, **kwargs)
        if not is_inside:
            now.output(heads[0][..., : now.dim_value])

    return call


def resize(site: OpenSite, shape: SiteShape, choice: Choice) -> None:
    """Give a site the sizes of a choice, with weights that mean nothing."""
    state, geometry = CollabConfig.on(site.model).site(site.site), resized(shape, choice)
    for part in PARTS.values():
        state = part.resize(site, state, shape, geometry)


def best_seconds(function: Callable[[], object]) -> float:
    """The shortest of some calls."""
    function()
    times: list[float] = []
    while len(times) < ROUNDS or sum(times) < LEAST_SECONDS:
        started = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)
