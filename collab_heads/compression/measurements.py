"""Measure a model before a plan is made: the error of each part of a site by its size, and its effect on the output.

Everything is fitted to some calibration examples and measured on others: on the same examples, narrow values and
refitted heads look better than they are. Errors are squares: the mean square of the change of a site's output, as a
share of its variance. The errors of the parts of a site nearly add up as long as they are small.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from collab_heads.base.memory import give_back_memory
from collab_heads.base.numerics import few_threads
from collab_heads.base.option_values import SitePart
from collab_heads.base.progress import one_bar, progress_bar
from collab_heads.calibration.calibrate import CalibratedSites
from collab_heads.compression.kept_fits import KeptFits
from collab_heads.compression.measured_sites import kept_measurements
from collab_heads.compression.measures import SiteUse, Workload, count_work, other_operations
from collab_heads.compression.options import PlanOptions
from collab_heads.compression.parts.shape import (
    AttentionShape,
    FeedForwardShape,
    Shape,
    TableShape,
    shape_of,
)
from collab_heads.compression.parts.table import PARTS, site_errors
from collab_heads.compression.probe import Probe
from collab_heads.compression.sensitivities import Sensitivities, SiteErrors, with_refinement
from collab_heads.errors import ArgumentError, CalibrationError, ModelStateError, UnsupportedModelError
from collab_heads.fitting.kinds import FITS
from collab_heads.heads.prune import check_prunable
from collab_heads.layers.layout import widths
from collab_heads.layers.output import HeadOutputProjection
from collab_heads.model.open_layers import OpenFeedForward, OpenLayers, OpenLayerSite, OpenPart, OpenSite, OpenTable
from collab_heads.model.refusals import check_feed_forwards, check_swappable, check_values
from collab_heads.model.site_size import TableGeometry
from collab_heads.running.batches import each_batch, num_rows, select
from collab_heads.sites.record import CollabConfig
from collab_heads.sites.site import select_sites

logger = logging.get_logger("transformers.collab_heads")  # below transformers' own: its verbosity counts
HELD_OUT = 8  # one example of so many is measured on, and not fitted to
MEASURED = 64  # examples that are measured on, at most
PROBED, FEWEST = 1024, 8  # positions, about, and examples, at least, that are read to measure a sensitivity
NAMED = 3  # sites in a message
TOKENS_PER_NEURON = 8  # MiniLM at half: with 9 its error is 2 % above that with 37, with 2 it is 16 % above


@dataclass(frozen=True, eq=False)
class Measurements:
    """The measurements of a model that a plan is made from, and that its choices are fitted with.

    Attributes:
        layers: the layers of the model, which is unchanged.
        sites: those that may change.
        tables: the weights outside of the sites that may get few bits.
        shapes: path -> its shape.
        options: the options of the plan.
        fitted: the calibration on the examples to fit to.
        batch: the first batch, for times.
        work: path -> work of the site on the batches.
        others: multiplications of all other projections of the model on the batches.
        probe: measures how far the output of the model moves, on examples that no fit sees.
        errors: path -> squared errors of the model's output with the site; empty where a plan that was loaded says what
            to choose.
        kept: the fits that are kept while a run lasts.
        threads: torch's threads, with which its choices are fitted, too.
        condition: what differs once the model is changed.
    """

    layers: OpenLayers
    sites: list[OpenLayerSite]
    tables: list[OpenTable]
    shapes: Mapping[str, Shape]
    options: PlanOptions
    fitted: CalibratedSites
    batch: Mapping
    work: Mapping[str, Workload]
    others: int
    probe: Probe
    errors: Mapping[str, SiteErrors]
    kept: KeptFits
    threads: int
    condition: tuple[CollabConfig, list]

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        return self.layers.model

    @property
    def uses(self) -> dict[str, SiteUse]:
        """The use of each site, and of each table, by path."""
        found = {s.path: SiteUse(self.shapes[s.path], s.role, self.work[s.path]) for s in self.sites}
        return found | {t.path: SiteUse(self.shapes[t.path], t.role, Workload(0, 0, 0, 0)) for t in self.tables}

    @property
    def changing(self) -> list[OpenPart]:
        """The sites and tables that may change."""
        return [*self.sites, *self.tables]

    def check_model(self, layers: OpenLayers) -> None:
        """Raise ArgumentError unless these are measurements of this model as it is now."""
        if self.model is not layers.model:
            raise ArgumentError("the plan was made for another model: pass that one, or batches")
        if condition_of(layers) != self.condition:
            raise ArgumentError("the model was changed since the plan was made: make a new one")


def condition_of(layers: OpenLayers) -> tuple[CollabConfig, list]:
    """Return what differs once a model is changed: its record, its shapes, and the number of writes to its tensors.

    Tensors that were made in inference mode do not count writes and are left out.
    """
    shapes = [parameter.shape for parameter in layers.model.parameters()]
    tensors = (tensor for tensor in layers.model.parameters() if not tensor.is_inference())
    return layers.record, [shapes, [(id(tensor), tensor._version) for tensor in tensors]]


def measure_model(
    layers: OpenLayers,
    batches: Sequence[Mapping],
    options: PlanOptions,
    *,
    errors: bool = True,
    file: str | Path | None = None,
) -> Measurements:
    """Measure a model, which is not changed; arguments and errors are those of `plan`.

    Args:
        layers: the layers of the model.
        batches: input dicts as the model takes them.
        options: the options of the plan.
        errors: whether errors and sensitivities are measured, which take most of the time.
        file: keeps them as they are measured, see `plan`.
    """
    model, adapter, parts, kind = layers.model, layers.adapter, options.counted_parts, options.kind
    sites = choose_sites(layers, options.sites, parts, has_bits=bool(options.grid_bits))
    attention = [site for site in sites if isinstance(site, OpenSite)]
    may_narrow = FITS[kind].capability in adapter.capabilities
    stock = [site for site in attention if may_narrow and not site.is_swapped]
    shapes = {site.path: shape_of(site, kind, parts, options.multiple_of, options.grid_bits) for site in sites}
    tables = layers.tables if options.grid_table_bits and options.sites is None else []
    shapes |= {table.path: TableShape(TableGeometry.of(table), options.grid_table_bits) for table in tables}
    to_fit, held = hold_out(batches)
    with kept_measurements(file if errors else None, layers, batches, options, shapes) as measured:
        torch.set_num_threads(measured.threads)
        missing = [site for site in sites if errors and site.path not in measured.sites]
        with one_bar("calibrating"):
            fitted = CalibratedSites(model, stock, stock, sites, to_fit, are_kept=bool(missing))
            shown = CalibratedSites(model, stock, stock, sites, held, are_held_out=True) if missing else None
            work, probe = count_work(model, batches, sites), Probe(model, held, attention)
            others = other_operations(model, batches, sites)
        if attention and probe.longest <= 1:
            raise CalibrationError(
                "the calibration examples hold one token each, which attends to itself: pass sentences"
            )
        warn_of_other_widths(shapes, options.multiple_of)
        warn_of_few_tokens(shapes, work)
        few = fewer(held, PROBED) if missing else held
        quick = probe if few is held else Probe(model, few, ())
        sensitivities = Sensitivities(layers, sites, quick, options.fit)
        for site in progress_bar(missing, desc="measuring sites"):
            assert shown is not None
            seen, shape = fitted.take(site.path), shapes[site.path]
            with few_threads(widths(site.output)[0]):  # a name for what is shown would keep it in memory
                found = SiteErrors(shape, site_errors(site, shape, seen, shown.take(site.path)))
            measured.add(site.path, sensitivities.measure(site, found, seen))
            del seen  # before the next one is made
            give_back_memory()
        for table in tables:
            if errors and table.path not in measured.sites:
                measured.add(table.path, sensitivities.of_table(table, shapes[table.path]))
    every = {each.path: measured.sites[each.path] for each in (*sites, *tables) if errors}
    return Measurements(
        *(layers, sites, tables, shapes, options, fitted, batches[0], work, others, probe),
        {path: SiteErrors(shapes[path], of) for path, of in with_refinement(every).items()},
        *(KeptFits.beside(measured.path, measured.run), measured.threads, condition_of(layers)),
    )


def warn_of_other_widths(shapes: Mapping[str, Shape], multiple_of: int) -> None:
    """Warn of sites that have widths now which are not multiples: what stays of them keeps its width."""
    others = {path: [n for n in shape.geometry.inner_widths if n % multiple_of] for path, shape in shapes.items()}
    if found := [f"{path} ({', '.join(map(str, dict.fromkeys(n)))})" for path, n in others.items() if n]:
        logger.warning(
            "multiple_of=%d: %s of the %d sites have other widths now, and keep them unless they become smaller: %s%s",
            *(multiple_of, len(found), len(shapes), ", ".join(found[:NAMED]), ", …" if len(found) > NAMED else ""),
        )


def warn_of_few_tokens(shapes: Mapping[str, Shape], work: Mapping[str, Workload]) -> None:
    """Warn if the batches hold few tokens for the neurons of some block."""
    blocks = {path: shape.geometry.neurons for path, shape in shapes.items() if isinstance(shape, FeedForwardShape)}
    tokens, neurons = min(
        ((work[path].queries, count) for path, count in blocks.items()),
        key=lambda each: each[0] / each[1],
        default=(1, 0),
    )
    if tokens < TOKENS_PER_NEURON * neurons:
        logger.warning_once(
            f"{tokens:,} tokens are few for blocks of {neurons:,} neurons, which lose more on other texts than they "
            f"need to: pass at least {TOKENS_PER_NEURON * neurons:,}, of all kinds of text that the model will read"
        )


def choose_sites(
    layers: OpenLayers, names: str | Iterable[str] | None, parts: tuple[SitePart, ...], *, has_bits: bool = False
) -> list[OpenLayerSite]:
    """Return the named sites that have some of the parts, if all of them can be changed, in model order.

    Every site has weights, and counts if they may have few bits.

    Raises:
        ArgumentError: if a name is neither a role nor a path of the model.
        UnsupportedModelError: if only feed-forward blocks may change, and the adapter does not say where they are.
        ModelStateError: if a site has gates or alphas, or cannot be changed safely.
    """
    shapes = list(dict.fromkeys(PARTS[name].shape for name in parts))
    kinds = {AttentionShape: OpenSite, FeedForwardShape: OpenFeedForward}
    if not (parts or has_bits):  # of tables alone
        return []
    wanted = (OpenSite, OpenFeedForward) if has_bits else tuple(kinds[shape] for shape in shapes)
    if wanted == (OpenFeedForward,) and not layers.adapter.feed_forwards:
        raise UnsupportedModelError(
            f"{type(layers.adapter).__name__} does not say where feed-forward blocks are (`feed_forwards`)"
        )
    available = [site for site in layers.in_order if isinstance(site, OpenSite) or site.num_neurons]
    named = f"parts={', '.join(parts)}"
    if not any(isinstance(site, wanted) for site in available):
        left = {AttentionShape: "heads", FeedForwardShape: "neurons"}
        raise ModelStateError(
            f"the model has no {' or '.join(left[shape] for shape in shapes)} left: there is nothing to compress "
            f"({named})"
        )
    chosen = {site.path for site in select_sites([site.site for site in available], names)}
    sites = [site for site in available if site.path in chosen and isinstance(site, wanted)]
    if not sites:
        raise ArgumentError(f"sites={names!r} and {named} leave nothing to compress: no such site has such a part")
    attention = [site for site in sites if isinstance(site, OpenSite)]
    check_prunable(layers, attention)
    if parts:
        check_swappable(layers, [site for site in attention if not site.is_swapped])
        check_values(layers, attention)
    for site in attention:
        if isinstance(site.output, HeadOutputProjection):
            what = "gates" if site.output.gates is not None else "alphas"
            raise ModelStateError(
                f"{site.path} has {what}, whose heads are still being chosen: prune_heads(model) first, or "
                "fold_heads(model) to keep all heads"
            )
    check_feed_forwards(layers.model, [site for site in sites if isinstance(site, OpenFeedForward)])
    return sites


def every_nth(batches: Sequence[Mapping], n: int) -> tuple[list[Mapping], list[Mapping]]:
    """Return the other examples, and every n-th, both as batches; a batch that cannot be divided counts as one."""
    others: list[Mapping] = []
    chosen: list[Mapping] = []
    seen = 0
    for batch in batches:
        count = num_rows(batch)
        if count is None:
            (chosen if seen % n == n - 1 else others).append(batch)
            seen += 1
            continue
        is_chosen = torch.arange(seen, seen + count) % n == n - 1
        for part, rows in ((others, ~is_chosen), (chosen, is_chosen)):
            if rows.any():
                part.append(select(batch, rows))
        seen += count
    return others, chosen


def fewer(batches: Sequence[Mapping], most: int) -> Sequence[Mapping]:
    """Return an even sample of the examples of batches, of about so many positions, and at least eight of them.

    The batches themselves are returned if they are so few, or hold no ids. A batch that cannot be divided is one.
    """
    ids = [each for batch in batches if isinstance(each := batch.get("input_ids"), Tensor)]
    n = min(round(sum(each.numel() for each in ids) / most), sum(num_rows(batch) or 1 for batch in batches) // FEWEST)
    return batches if n <= 1 else every_nth(batches, n)[1]


def hold_out(batches: Iterable[Mapping]) -> tuple[list[Mapping], list[Mapping]]:
    """Divide calibration batches into examples to fit to and examples to measure on.

    Every eighth example is measured on, or fewer if that were more than `MEASURED`. Batches whose tensors do not all
    have one row per example are kept whole.

    Args:
        batches: input dicts as the model takes them.

    Returns:
        Both as batches. A single example, or a single batch that cannot be divided, is in both.

    Raises:
        CalibrationError: if there are no batches, or they are not dicts.
    """
    listed = list(each_batch(batches))
    counts = [num_rows(batch) for batch in listed]
    if 0 in counts:
        raise CalibrationError("a calibration batch holds no examples: leave it out")
    total = sum(1 if count is None else count for count in counts)
    fitted, held = every_nth(listed, max(HELD_OUT, -(-total // MEASURED)))
    if held:
        return fitted, held
    first, count = fitted[-1], num_rows(fitted[-1])
    if count is not None and count > 1:  # fewer than HELD_OUT examples in all: the last one
        last = torch.arange(count) == count - 1
        rest = select(first, ~last)
        return [*fitted[:-1], rest], [select(first, last)]
    if len(fitted) > 1:
        return fitted[:-1], fitted[-1:]
    logger.warning(
        "there is one calibration example, or one batch that cannot be divided: fits and measurements both use it, so "
        "the error says little. Pass at least %d examples; 256 to 2,048 are usual",
        HELD_OUT,
    )
    return fitted, fitted
