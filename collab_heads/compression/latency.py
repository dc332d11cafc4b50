"""How long a site takes on this machine, as it is and as it would be, for the inputs that the user gives."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from collab_heads.compression.choices import Choice, SiteShape
from collab_heads.compression.fitting import reopened
from collab_heads.compression.measures import SiteUse
from collab_heads.layers.output import keep_output_heads
from collab_heads.layers.query_key_kinds import build_query_key
from collab_heads.layers.values import keep_value_rows
from collab_heads.model.backends import evaluating
from collab_heads.model.batches import run_batches
from collab_heads.model.open_site import OpenSite
from collab_heads.model.undoing import undone
from collab_heads.sites import Role

KNOTS = 4  # sizes of each part that are timed, or one more; between them times are interpolated
ROUNDS, LEAST_SECONDS = 5, 0.02  # calls of each, at least


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
        self.tables: dict[tuple[SiteShape, Role], Table] = {}
        different = {(shapes[site.path], site.role): site for site in sites}
        for (shape, role), site in tqdm(different.items(), desc="timing sites", leave=False):
            self.tables[shape, role] = time_site(model, site, shape, batch)

    def __call__(self, use: SiteUse, choice: Choice) -> float:
        """Seconds that a site takes in one forward pass."""
        return use.calls * self.tables[use.shape, use.role].seconds(use.shape, choice)


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
        for axis, size in zip(self.axes, sizes(shape, choice), strict=True):
            place = np.interp(size, axis, range(len(axis)))
            low, high = math.floor(place), math.ceil(place)
            times = times[low] + (place - low) * (times[high] - times[low])
        return float(times)


def sizes(shape: SiteShape, choice: Choice) -> tuple[int, int, int]:
    """A choice as three numbers; a query/key projection that stays counts as wider than any other."""
    return choice.heads, shape.whole_query_key if choice.query_key is None else choice.query_key, choice.value


def knots(smaller: Sequence[int], whole: int) -> list[int]:
    """A few of the sizes: the smallest, the largest and the whole one among them.

    Between the largest and the whole one nothing is interpolated: there the site changes its class.
    """
    every = -(-len(smaller) // (KNOTS - 1)) or 1
    return sorted({*smaller[::every], *smaller[-1:], whole})


def time_site(model: PreTrainedModel, site: OpenSite, shape: SiteShape, batch: Mapping) -> Table:
    """Time a site at all combinations of some sizes, in turns."""
    axes = (
        knots(shape.head_counts(), shape.num_heads),
        knots(shape.query_key_widths(), shape.whole_query_key),
        knots(shape.value_widths(), shape.dim_value),
    )
    call, seconds = captured(model, site, batch), np.zeros(tuple(map(len, axes)))
    for place in np.ndindex(seconds.shape):
        heads, width, value = (axis[i] for axis, i in zip(axes, place, strict=True))
        choice = Choice(heads, width if width < shape.whole_query_key else None, value)
        with undone(model, [site]), evaluating(model):
            resize(reopened(site), shape, choice)
            seconds[place] = best_seconds(lambda: call(reopened(site)))
    return Table(axes, seconds)


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
    state, like = shape.state(choice), site.value.weight
    if choice.heads < shape.num_heads:
        site.adapter.shrink(site.module, list(range(choice.heads)))
        keep_output_heads(site.output, list(range(choice.heads)), shape.num_heads)
    if state is not None and not site.is_swapped:
        query_key = build_query_key(state, choice.heads, *shape.dims[:2], device=like.device, dtype=like.dtype)
        for parameter in query_key.parameters():
            torch.nn.init.constant_(parameter, 1e-2)
        site.adapter.install(site.module, query_key)
    if choice.value < shape.dim_value:
        keep_value_rows(site.value, site.output, shape.dim_value, choice.value)
        site.adapter.note_width(site.module)


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
