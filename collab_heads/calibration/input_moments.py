"""Second moments of the inputs of each site, of the outputs of its heads and of neurons, on real batches.

A decomposition should preserve the scores and the output on real inputs, not the weights: see `decompose` and `values`.
Padding does not count. A module that serves several layers accumulates over all of them.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from collab_heads.base.numerics import float64
from collab_heads.errors import CalibrationError, NonFiniteError
from collab_heads.model.open_layers import OpenLayerSite, OpenSite
from collab_heads.running.batches import sides

SIDES = ("query", "key")


class InputMoments:
    """The running sums of one side (query or key) of one site, or of what its output projection reads, in float64.

    Attributes:
        count: tokens seen.
        total: [D], sum of the inputs.
        outer: [D, D], sum of their outer products.
        within: [D, D], the same after subtracting the mean of each sequence; empty if it is not needed.
    """

    def __init__(self, like: Tensor, *, centres: bool = True):
        self.count = 0
        self.total = float64(torch.zeros_like(like[0, 0]))
        self.outer = torch.zeros_like(self.total).outer(self.total)
        self.within = torch.zeros_like(self.outer) if centres else self.total.new_zeros(0, 0)

    def add(self, inputs: Tensor, mask: Tensor | None) -> None:
        """Add a batch: inputs [B, T, D], mask [B, T] (true where a token counts) or None for all."""
        if mask is None:
            mask = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
        tokens = float64(inputs.detach()[mask])  # (tokens that count, D)
        counts = mask.sum(1).to(tokens.device)  # (B,)
        sequence = torch.arange(len(counts), device=tokens.device).repeat_interleave(counts)
        sums = tokens.new_zeros(len(counts), tokens.shape[-1]).index_add_(0, sequence, tokens)  # (B, D)
        outer = tokens.mT @ tokens
        self.count += int(counts.sum())
        self.total += sums.sum(0)
        self.outer += outer
        if self.within.numel():
            self.within += outer.sub_(sums.mT @ (sums / counts.clamp(min=1)[:, None]))

    def merge(self, other: "InputMoments") -> None:
        """Add the sums of another object."""
        self.count += other.count
        for name in ("total", "outer", "within"):
            getattr(self, name).add_(getattr(other, name))

    def part(self, places: Tensor) -> "InputMoments":
        """Return the moments of some of the dimensions, given by their indices."""
        part = copy.copy(self)
        part.total = self.total[places]
        part.outer = self.outer[places][:, places]
        part.within = self.within[places][:, places] if self.within.numel() else self.within
        return part

    def mean(self) -> Tensor:
        """Return E[x]: [D]."""
        return self.total / self.count

    def second(self) -> Tensor:
        """Return E[x x^T]: [D, D]."""
        return self.outer / self.count

    def augmented(self) -> Tensor:
        """Return E[[x; 1][x; 1]^T]: [D + 1, D + 1], for weights with the bias as a last column."""
        mean = self.mean()
        corner = torch.ones(1, 1, dtype=mean.dtype, device=mean.device)
        return torch.cat(
            [torch.cat([self.second(), mean[:, None]], dim=1), torch.cat([mean[None], corner], dim=1)], dim=0
        )

    def centred(self) -> Tensor:
        """Return E[(x - mean of its sequence)(...)^T]: [D, D]. What is constant over keys cancels in the softmax."""
        return self.within / self.count


class Listener:
    """A listener that takes the moments of both sides of one site, with pre-hooks on its projections.

    An input that both sides share, as in self-attention, is summed once.
    """

    def __init__(self, site: OpenSite, masks: Mapping[str, Tensor | None]):
        self.site, self.masks = site, masks
        self.inputs: dict[str, Tensor] = {}  # of the call that is under way
        self.sums: dict[str, InputMoments] = {}  # of "query", "key" and "both"

    def hear(self, side: str, states: Tensor) -> None:
        """Take the input of one side; the second side completes a call."""
        self.inputs[side] = states
        if len(self.inputs) < len(SIDES):
            return
        masks = dict(zip(SIDES, (self.masks.get(name) for name in sides(self.site.site)), strict=True))
        for name, inputs in self.inputs.items():
            check_inputs(self.site, name, inputs, masks[name])
        if self.inputs["query"] is self.inputs["key"] and masks["query"] is masks["key"]:
            self.inputs = {"both": states}
            masks = {"both": masks["query"]}
        for name, inputs in self.inputs.items():
            if name not in self.sums:
                self.sums[name] = InputMoments(inputs)
            self.sums[name].add(inputs, masks[name])
        self.inputs = {}

    def moments(self) -> tuple[InputMoments, InputMoments]:
        """Return the moments of the query side and of the key side; raise CalibrationError if no token was seen."""
        sums = [[self.sums[name] for name in (side, "both") if name in self.sums] for side in SIDES]
        if not all(parts and parts[0].count for parts in sums):
            raise saw_nothing(self.site)
        for first, *others in sums:
            for other in others:
                first.merge(other)
        return sums[0][0], sums[1][0]


class OutputListener:
    """A listener that takes the moments of what the output projection of a site reads, with a pre-hook on it.

    Of attention that is the concatenated heads, of a feed-forward block the neurons.
    """

    def __init__(self, site: OpenLayerSite, masks: Mapping[str, Tensor | None]):
        self.site, self.masks = site, masks
        self.sums: InputMoments | None = None

    def hear(self, projection: nn.Module, args: tuple) -> None:
        """Take the input of a call, [B, T, n], or [B * T, n] where a layer takes all tokens in a row."""
        heads, mask = args[0], self.masks.get(sides(self.site.site)[0])
        if heads.ndim == 2:
            heads = heads[None] if mask is None else heads.unflatten(0, mask.shape)
        check_inputs(self.site, "output", heads, mask)
        if self.sums is None:
            self.sums = InputMoments(heads, centres=False)
        self.sums.add(heads, mask)

    def moments(self) -> InputMoments:
        """Return the moments; raise CalibrationError if no token was seen."""
        if self.sums is None or not self.sums.count:
            raise saw_nothing(self.site)
        return self.sums


def check_inputs(site: OpenLayerSite, name: str, states: Tensor, mask: Tensor | None) -> None:
    """Raise CalibrationError if a mask does not fit its inputs, NonFiniteError if inputs that count are not finite."""
    if mask is not None and mask.shape != states.shape[:2]:
        side = sides(site.site)[name == "key"]
        raise CalibrationError(
            f"{site.path}: the {side} mask {tuple(mask.shape)} does not fit the inputs of its {name} "
            f"{tuple(states.shape)}; give attention masks of shape (batch, tokens)"
        )
    if not torch.isfinite(states if mask is None else states[mask]).all():
        raise NonFiniteError(f"{site.path}: calibration inputs of its {name} contain NaN or inf")


def saw_nothing(site: OpenLayerSite) -> CalibrationError:
    """Make the error for a site that no token reached."""
    return CalibrationError(
        f"{site.path} saw no tokens: give batches that reach it "
        "(decoder sites need labels or decoder_input_ids), or leave it out with sites="
    )


@contextmanager
def listening(sites: Sequence[OpenSite], masks: Mapping[str, Tensor | None]) -> Iterator[list[Listener]]:
    """Listen to unchanged sites while the context is open; `masks` holds the token masks of the current inputs."""
    listeners, handles = [Listener(site, masks) for site in sites], []
    try:
        for listener in listeners:
            for side, projection in zip(SIDES, listener.site.projections, strict=True):
                hook = projection.register_forward_pre_hook(
                    lambda _, args, hear=listener.hear, side=side: hear(side, args[0])
                )
                handles.append(hook)
        yield listeners
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def listening_to_outputs(
    sites: Sequence[OpenLayerSite], masks: Mapping[str, Tensor | None]
) -> Iterator[list[OutputListener]]:
    """Listen to what output projections read, heads before gates and alphas, while the context is open."""
    listeners = [OutputListener(site, masks) for site in sites]
    handles = [listener.site.output.register_forward_pre_hook(listener.hear) for listener in listeners]
    try:
        yield listeners
    finally:
        for handle in handles:
            handle.remove()
