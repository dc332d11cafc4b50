"""Second moments of the inputs of each site, of the outputs of its heads and of neurons, on real batches.

A decomposition should preserve the scores and the output on real inputs, not the weights: see `decompose` and `values`.
Padding does not count. A module that serves several layers accumulates over all of them.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from collab_heads.base.numerics import add_products_, float64, mirror_
from collab_heads.errors import CalibrationError, NonFiniteError
from collab_heads.model.open_layers import OpenLayerSite, OpenSite
from collab_heads.running.attention_calls import SIDES, on_inputs
from collab_heads.running.batches import sides
from collab_heads.running.outputs import FAR

LARGE = 1e12  # norms beyond it, or below its inverse, have squares that float32 may not hold


@dataclass
class InputMoments:
    """The moments of one side (query or key) of one site, or of what its output projection reads, in float64.

    Attributes:
        count: tokens seen.
        total: [D], sum of the inputs.
        outer: [D, D], sum of their outer products.
        within: [D, D], the same after subtracting the mean of each sequence; empty if it is not needed.
    """

    count: int
    total: Tensor
    outer: Tensor
    within: Tensor

    @classmethod
    def of(cls, inputs: Tensor, mask: Tensor | None = None, *, centres: bool = True) -> "InputMoments":
        """Return the moments of one batch: inputs [B, T, D], mask [B, T] (true where a token counts) or None."""
        running = RunningMoments(centres=centres)
        running.add(inputs, mask)
        return running.finished()

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


class RunningMoments:
    """Sums over batches, from which the moments follow: products in the precision of the inputs, sums in float64.

    Rounding must stay below the variances that fits look at. So the means of sequences, or of the first tokens, are
    subtracted before, and tokens of outlying norm, as the first one in many decoders, are multiplied in float64.

    Args:
        centres: whether sequences are centred, too.
        far: whether tokens of outlying norm count.
    """

    def __init__(self, *, centres: bool = True, far: bool = True):
        self.centres, self.far, self.count = centres, far, 0
        self.shift = self.total = self.upper = self.between = torch.empty(0)

    def add(self, inputs: Tensor, mask: Tensor | None) -> None:
        """Add a batch: inputs [B, T, D], mask [B, T] (true where a token counts) or None for all."""
        if mask is None:
            mask = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
        tokens = inputs.detach()[mask]  # (tokens that count, D)
        if not len(tokens):
            return
        norms = at_least_float32(tokens).norm(dim=1)
        usual, is_far = float(norms.median()), norms > FAR * norms.median()  # far tokens are summed in float64
        if usual and not self.far:
            mask, tokens, is_far = mask.masked_scatter(mask, ~is_far), tokens[~is_far], is_far[~is_far]
        may_round = torch.get_float32_matmul_precision() == "highest" and 1 / LARGE < usual < LARGE
        tokens = at_least_float32(tokens) if may_round else float64(tokens)
        if not self.count:
            self.shift = tokens[~is_far].mean(0)
            self.total = torch.zeros_like(float64(self.shift))
            self.upper = self.total.new_zeros(len(self.total), len(self.total))
            self.between = torch.zeros_like(self.upper) if self.centres else self.between
        tokens, self.count = tokens - self.shift, self.count + len(tokens)
        if self.centres:
            counts = mask.sum(1).to(self.total.device)  # (B,)
            sequence = torch.arange(len(counts), device=self.total.device).repeat_interleave(counts)
            sums = self.total.new_zeros(len(counts), len(self.total))  # (B, D)
            sums.index_add_(0, sequence, float64(tokens))
            means = sums / counts.clamp(min=1)[:, None]
            self.total += sums.sum(0)
            self.between += sums.mT @ means
            tokens = tokens - means[sequence].to(tokens)
        else:
            self.total += float64(tokens.sum(0))
        if is_far.any():
            add_products_(self.upper, float64(tokens[is_far]))
            tokens = tokens[~is_far]
        add_products_(self.upper, tokens)

    def finished(self) -> InputMoments:
        """Return the moments; nothing can be added afterwards."""
        sums, total, shift = mirror_(self.upper), self.total, float64(self.shift)
        outer = self.between.add_(sums) if self.centres else sums
        outer.addr_(shift, total).addr_(total, shift).addr_(shift, shift, alpha=self.count)
        return InputMoments(
            self.count, total + self.count * shift, outer, sums if self.centres else sums.new_zeros(0, 0)
        )


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert half precision to float32."""
    return tensor.float() if torch.finfo(tensor.dtype).bits < torch.finfo(torch.float32).bits else tensor


class Listener:
    """A listener that takes the moments of both sides of one site.

    An input that both sides share, as in self-attention, is summed once.
    """

    def __init__(self, site: OpenSite, masks: Mapping[str, Tensor | None]):
        self.site, self.masks = site, masks
        self.inputs: dict[str, Tensor] = {}  # of the call that is under way
        self.sums: dict[str, RunningMoments] = {}  # of "query", "key" and "both"

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
                self.sums[name] = RunningMoments()
            self.sums[name].add(inputs, masks[name])
        self.inputs = {}

    def moments(self) -> tuple[InputMoments, InputMoments]:
        """Return the moments of the query side and of the key side; raise CalibrationError if no token was seen."""
        found = {name: sums.finished() for name, sums in self.sums.items() if sums.count}
        sums = [[found[name] for name in (side, "both") if name in found] for side in SIDES]
        if not all(sums):
            raise saw_nothing(self.site)
        for first, *others in sums:
            for other in others:
                first.merge(other)
        return sums[0][0], sums[1][0]


class OutputListener:
    """A listener that takes the moments of what the output projection of a site reads, with a pre-hook on it.

    Of attention that is the concatenated heads, of a feed-forward block the neurons.
    """

    def __init__(self, site: OpenLayerSite, masks: Mapping[str, Tensor | None], *, far: bool = True):
        self.site, self.masks = site, masks
        self.sums = RunningMoments(centres=False, far=far)

    def hear(self, projection: nn.Module, args: tuple) -> None:
        """Take the input of a call, [B, T, n], or [B * T, n] where a layer takes all tokens in a row."""
        heads, mask = args[0], self.masks.get(sides(self.site.site)[0])
        if heads.ndim == 2:
            heads = heads[None] if mask is None else heads.unflatten(0, mask.shape)
        check_inputs(self.site, "output", heads, mask)
        self.sums.add(heads, mask)

    def moments(self) -> InputMoments:
        """Return the moments; raise CalibrationError if no token was seen."""
        if not self.sums.count:
            raise saw_nothing(self.site)
        return self.sums.finished()


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
            handles += on_inputs(listener.site, listener.hear)
        yield listeners
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def listening_to_outputs(
    sites: Sequence[OpenLayerSite], masks: Mapping[str, Tensor | None], *, far: bool = True
) -> Iterator[list[OutputListener]]:
    """Listen to what output projections read, heads before gates and alphas, while the context is open.

    Args:
        sites: the sites.
        masks: holds the token masks of the current inputs.
        far: whether tokens of outlying norm count.
    """
    listeners = [OutputListener(site, masks, far=far) for site in sites]
    handles = [listener.site.output.register_forward_pre_hook(listener.hear) for listener in listeners]
    try:
        yield listeners
    finally:
        for handle in handles:
            handle.remove()
