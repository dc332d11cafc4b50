"""Run the calibration batches, and keep what the fit of every site needs."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.base.progress import one_bar
from collab_heads.calibration.input_moments import InputMoments, listening, listening_to_outputs
from collab_heads.calibration.spilled import Spilled
from collab_heads.layers.layout import widths
from collab_heads.model.open_layers import OpenLayerSite, OpenSite
from collab_heads.running.attention_calls import Call, recording_calls
from collab_heads.running.batches import check_batches, num_rows, run_batches
from collab_heads.running.blocks import BlockStarts
from collab_heads.running.portions import portions


@dataclass
class Calibrations:
    """The calibration of several sites of a model.

    Attributes:
        query_key: path -> the calibration for the fit of a query/key projection.
        outputs: path -> the moments of what the output projection of a site reads: its heads, or neurons.
        orders: path -> what the removal of each neuron costs, once it was computed from the moments.
        regressions: path -> the regression of a block on its neurons, once it was made in place of the moments.
    """

    query_key: dict[str, "SiteCalibration"] = field(default_factory=dict)
    outputs: dict[str, InputMoments] = field(default_factory=dict)
    orders: dict[str, Tensor] = field(default_factory=dict)
    regressions: dict[str, Any] = field(default_factory=dict)

    def copied(self) -> "Calibrations":
        """Return the same in dicts of their own: a fit takes out what it uses."""
        return Calibrations(*(dict(getattr(self, each.name)) for each in fields(self)))

    def merge(self, other: "Calibrations") -> None:
        """Add the moments of the same sites on other batches."""
        pairs = [(moments, other.outputs[path]) for path, moments in self.outputs.items()]
        for path, sides in self.query_key.items():
            pairs += [(sides.query, other.query_key[path].query), (sides.key, other.query_key[path].key)]
        for mine, theirs in {id(mine): (mine, theirs) for mine, theirs in pairs}.values():  # both sides may be one
            mine.merge(theirs)


@dataclass(frozen=True)
class SiteCalibration:
    """The input moments and the recorded calls of one site.

    Attributes:
        query: moments of the query-side inputs.
        key: moments of the key-side inputs.
        calls: calls of the site's module; empty if they were not recorded.
        kept: what a fit has computed from them, by name, for other fits of the same weights.
    """

    query: InputMoments
    key: InputMoments
    calls: Sequence[Call] = ()
    kept: dict[str, Tensor] = field(default_factory=dict, compare=False)


def calibrate(
    model: PreTrainedModel,
    sites: Sequence[OpenSite],
    recorded: Sequence[OpenSite],
    narrowed: Sequence[OpenLayerSite],
    batches: Iterable[Mapping],
    starts: BlockStarts | None = None,
    *,
    far: bool = True,
) -> Calibrations:
    """Run calibration batches through an unchanged model, without gradients, in evaluation mode.

    Args:
        model: the model, which is not changed.
        sites: the sites whose input moments are taken.
        recorded: those of `sites` whose calls are kept, too.
        narrowed: the sites, collaborative or not, and feed-forward blocks, for whose outputs moments are taken.
        batches: input dicts as the model takes them; tensors are moved to the model's device. An encoder-decoder needs
            decoder inputs or labels.
        starts: starts on the same batches; None runs the whole model.
        far: whether tokens of outlying norm count in the moments of outputs.

    Raises:
        CalibrationError: if there are no batches, the model cannot take one, a mask does not fit, a site saw nothing,
            or its calls cannot be recorded.
        NonFiniteError: if an input of a site contains NaN or inf; the site is named.
    """
    masks: dict[str, Tensor | None] = {}
    paths = [site.path for site in dict.fromkeys((*sites, *narrowed))]
    with (
        nullcontext() if starts is None else starts.within(paths),
        listening(sites, masks) as listeners,
        listening_to_outputs(narrowed, masks, far=far) as head_listeners,
        recording_calls(model, recorded, masks) as recorder,
    ):
        run_batches(model, batches, masks, "calibrating", cut=cut_for(model))
    moments = {listener.site.path: listener.moments() for listener in listeners}
    return Calibrations(
        {path: SiteCalibration(*both, recorder.calls_of(path)) for path, both in moments.items()},
        {listener.site.path: listener.moments() for listener in head_listeners},
    )


def cut_for(model: PreTrainedModel) -> Callable[[Mapping], Iterable[Mapping]]:
    """Return what cuts the calibration batches of a model into portions."""
    return functools.partial(portions, is_encoder_decoder=model.config.is_encoder_decoder)


RECORDED = 512  # examples whose calls are kept, about: the refinement reads one after the other
SHARE = 0.25  # of the model's own memory: the most that moments may take
LEAST = 160 * 2**20  # bytes that moments may take in any case: each further group is a further pass over the batches
FEW = 4  # a share of these where a pass is short, over a few examples
FLOAT64 = 8  # bytes


class CalibratedSites:
    """The calibrations of sites, made group by group so that moments do not fill the memory.

    Sites should be requested in model order: only the calibrations of one group are held at a time.

    Args:
        model: the model, which must not change while groups are calibrated.
        sites: the sites whose input moments are taken.
        recorded: those of `sites` whose calls are kept, too.
        narrowed: the sites and feed-forward blocks for whose outputs moments are taken.
        batches: see `calibrate`; listed if several passes are needed, or calls are kept. Moments are taken of all
            batches; of more than `RECORDED` examples, calls are kept for every second batch, or every third...
        are_held_out: whether the batches hold examples to measure on. They are few, see `most_bytes`, and tokens of
            outlying norm do not count in the moments of outputs: errors would be those of these tokens alone.
        are_kept: whether the calibrations of several groups are kept in a temporary file, to be asked for again.

    Attributes:
        groups: the paths of the sites that are calibrated together.

    Raises:
        CalibrationError, NonFiniteError: as in `calibrate`; for later groups when they are requested.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sequence[OpenSite],
        recorded: Sequence[OpenSite],
        narrowed: Sequence[OpenLayerSite],
        batches: Iterable[Mapping],
        *,
        are_held_out: bool = False,
        are_kept: bool = False,
    ):
        self.model, self.sites, self.recorded, self.narrowed = model, sites, recorded, narrowed
        self.far = not are_held_out
        sizes = {path: FLOAT64 * size for path, size in moment_counts(sites, narrowed).items()}
        limit = most_bytes(sum(parameter.nbytes for parameter in model.parameters()), are_few=are_held_out)
        self.orders: dict[str, Tensor] = {}
        self.kept: dict[str, dict[str, Tensor]] = {}  # path -> what fits have computed, where a group is made again
        self.starts: dict[int, BlockStarts] = {}
        are_one = sum(sizes.values()) <= limit
        self.batches = batches if are_one and not recorded else check_batches(batches)
        self.step = -(-sum(num_rows(batch) or 1 for batch in self.batches) // RECORDED) if recorded else 1
        self.groups = [[*sizes]] if are_one else self.of_blocks(sizes, limit)
        self.spilled = Spilled(sum(sizes.values())) if are_kept and len(self.groups) > 1 else None
        self.open, self.seen = self.groups[0], self.calibrated(self.groups[0])

    def of_blocks(self, sizes: Mapping[str, int], limit: float) -> list[list[str]]:
        """Cut sites into groups: one for each block, where runs can begin and end at blocks."""
        starts = self.starts_on([*self.batches][:: self.step], 0)
        groups: dict[str, list[str]] = {}
        for path in sizes:
            groups.setdefault(starts.block_of[path] if starts.block_of[path] in starts.blocks else "", []).append(path)
        others = groups.pop("", [])
        return [*groups.values(), *(grouped({path: sizes[path] for path in others}, limit) if others else [])]

    def starts_on(self, batches: Sequence[Mapping], number: int) -> BlockStarts:
        """Return the starts on one of the lists of batches."""
        if number not in self.starts:
            every = dict.fromkeys((*self.narrowed, *self.sites))
            self.starts[number] = BlockStarts(self.model, every, batches, cut_for(self.model))
        return self.starts[number]

    def of(self, path: str) -> Calibrations:
        """Return the calibrations of the group that holds a site; a new group replaces the one before."""
        if path not in self.open:
            self.seen = Calibrations()  # before the next one is made
            (self.open,) = [group for group in self.groups if path in group]
            self.seen = self.calibrated(self.open)
        return self.seen

    def take(self, path: str) -> Calibrations:
        """Return the calibration of one site alone; if there are several groups, it is not held here any longer.

        Its `regressions` are its own, and empty.
        """
        seen = self.of(path)
        query_key = {path: seen.query_key[path]} if path in seen.query_key else {}
        outputs = {path: seen.outputs[path]} if path in seen.outputs else {}
        if len(self.groups) > 1:
            self.open = [other for other in self.open if other != path]
            seen.query_key.pop(path, None)
            seen.outputs.pop(path, None)
        return Calibrations(query_key, outputs, self.orders)

    def release(self) -> None:
        """Free the memory of the present group if there are several; `of` makes it again on request."""
        if len(self.groups) > 1:
            self.open, self.seen = [], Calibrations()

    def calibrated(self, group: Sequence[str]) -> Calibrations:
        """Return the calibrations of one group, as they were kept, or after one pass over the batches."""
        seen: Calibrations | None = None if self.spilled is None else self.spilled.find(tuple(group))
        if seen is None:
            seen = self.calibrated_anew(group)
            if self.spilled is not None:
                self.spilled.add(tuple(group), seen)
        for path, each in seen.query_key.items():
            seen.query_key[path] = replace(each, kept=self.kept.setdefault(path, {}))
        return replace(seen, orders=self.orders)

    def calibrated_anew(self, group: Sequence[str]) -> Calibrations:
        """Calibrate one group in one pass over the batches."""
        sites, recorded = ([site for site in sites if site.path in group] for sites in (self.sites, self.recorded))
        narrowed = [site for site in self.narrowed if site.path in group]
        if self.step == 1:
            return self.run(sites, recorded, narrowed, self.batches)
        batches = list(self.batches)
        with one_bar("calibrating", (("calibrating", 1), ("calibrating", self.step - 1))):
            seen = self.run(sites, recorded, narrowed, batches[:: self.step])
            if rest := [batch for number, batch in enumerate(batches) if number % self.step]:
                seen.merge(self.run(sites, (), narrowed, rest, 1))
        return seen

    def run(
        self,
        sites: Sequence[OpenSite],
        recorded: Sequence[OpenSite],
        narrowed: Sequence[OpenLayerSite],
        batches: Iterable[Mapping],
        number: int = 0,
    ) -> Calibrations:
        """Calibrate some sites on one of the lists of batches; of several groups, each runs its own blocks alone."""
        starts = self.starts_on([*batches], number) if len(self.groups) > 1 else None
        return calibrate(self.model, sites, recorded, narrowed, batches, starts, far=self.far)


def moment_counts(sites: Sequence[OpenSite], narrowed: Sequence[OpenLayerSite]) -> dict[str, int]:
    """Count the numbers in the moments of each site: path -> count. An input has two matrices, an output has one."""
    counts = dict.fromkeys([site.path for site in (*narrowed, *sites)], 0)  # in model order
    for site in sites:
        dims = [projection.in_features for projection in site.projections]
        counts[site.path] += 2 * sum(width**2 for width in (dims[:1] if site.role != "dec-enc" else dims))
    for each in narrowed:
        counts[each.path] += widths(each.output)[0] ** 2
    return counts


def most_bytes(model_bytes: float, *, are_few: bool = False) -> float:
    """Return how many bytes the moments of a group may take.

    Args:
        model_bytes: of the model's parameters.
        are_few: whether a pass over the batches is short, so that smaller groups cost little time.
    """
    return max(SHARE * model_bytes, LEAST) / (FEW if are_few else 1)


def grouped(sizes: Mapping[str, int], limit: float) -> list[list[str]]:
    """Cut sites, in their order, into groups of at most `limit` in total; a larger site is a group of its own."""
    groups: list[list[str]] = [[]]
    for path, size in sizes.items():
        if groups[-1] and sum(sizes[other] for other in groups[-1]) + size > limit:
            groups.append([])
        groups[-1].append(path)
    return groups
