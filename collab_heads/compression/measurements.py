"""Measure a model before a plan is made: the error of each part of a site by its size, and its effect on the output.

Everything is fitted to some calibration examples and measured on others: on the same examples, narrow values and
refitted heads look better than they are. Errors are squares: the mean square of the change of a site's output, as a
share of its variance. The errors of the parts of a site nearly add up as long as they are small.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import logging

from collab_heads.base.memory import give_back_memory
from collab_heads.base.numerics import few_threads
from collab_heads.base.progress import one_bar, progress_bar
from collab_heads.calibration.calibrate import CalibratedSites
from collab_heads.compression.choosing import Choosing, warn_of_few_tokens, warn_of_other_widths
from collab_heads.compression.kept_fits import KeptFits
from collab_heads.compression.measured_sites import kept_measurements
from collab_heads.compression.measures import other_operations
from collab_heads.compression.parts.table import site_errors
from collab_heads.compression.probe import Probe
from collab_heads.compression.sensitivities import Sensitivities, SiteErrors, with_refinement
from collab_heads.errors import ArgumentError, CalibrationError
from collab_heads.fitting.kinds import FITS
from collab_heads.layers.layout import widths
from collab_heads.model.open_layers import OpenLayers
from collab_heads.running.batches import each_batch, num_rows, select
from collab_heads.sites.record import CollabConfig

logger = logging.get_logger("transformers.collab_heads")  # below transformers' own: its verbosity counts
HELD_OUT = 8  # one example of so many is measured on, and not fitted to
MEASURED = 64  # examples that are measured on, at most
PROBED, FEWEST = 1024, 8  # positions, about, and examples, at least, that are read to measure a sensitivity


@dataclass(frozen=True, eq=False)
class Measurements(Choosing):
    """The measurements of a model that a plan is made from, and that its choices are fitted with.

    The model is unchanged.

    Attributes:
        fitted: the calibration on the examples to fit to.
        batch: the first batch, for times.
        others: multiplications of all other projections of the model on the batches.
        probe: measures how far the output of the model moves, on examples that no fit sees.
        errors: path -> squared errors of the model's output with the site; empty where a plan that was loaded says what
            to choose.
        kept: the fits that are kept while a run lasts.
        threads: torch's threads, with which its choices are fitted, too.
        condition: what differs once the model is changed.
    """

    fitted: CalibratedSites
    batch: Mapping
    others: int
    probe: Probe
    errors: Mapping[str, SiteErrors]
    kept: KeptFits
    threads: int
    condition: tuple[CollabConfig, list]

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
    choosing: Choosing,
    batches: Sequence[Mapping],
    *,
    errors: bool = True,
    file: str | Path | None = None,
) -> Measurements:
    """Measure a model, which is not changed; arguments and errors are those of `plan`.

    Args:
        choosing: the sites and tables that may change.
        batches: input dicts as the model takes them.
        errors: whether errors and sensitivities are measured, which take most of the time.
        file: keeps them as they are measured, see `plan`.
    """
    layers, options, sites, shapes = choosing.layers, choosing.options, choosing.sites, choosing.shapes
    model, attention = choosing.model, choosing.attention
    may_narrow = FITS[options.kind].capability in layers.adapter.capabilities
    stock = [site for site in attention if may_narrow and not site.is_swapped]
    to_fit, held = hold_out(batches)
    with kept_measurements(file if errors else None, layers, batches, options, shapes) as measured:
        torch.set_num_threads(measured.threads)
        missing = [site for site in sites if errors and site.path not in measured.sites]
        with one_bar("calibrating"):
            fitted = CalibratedSites(model, stock, stock, sites, to_fit, are_kept=bool(missing))
            shown = CalibratedSites(model, stock, stock, sites, held, are_held_out=True) if missing else None
            probe = Probe(model, held, attention)
            others = other_operations(model, batches, sites)
        if attention and probe.longest <= 1:
            raise CalibrationError(
                "the calibration examples hold one token each, which attends to itself: pass sentences"
            )
        warn_of_other_widths(shapes, options.multiple_of)
        warn_of_few_tokens(shapes, choosing.work)
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
        for table in choosing.tables:
            if errors and table.path not in measured.sites:
                measured.add(table.path, sensitivities.of_table(table, shapes[table.path]))
    every = {each.path: measured.sites[each.path] for each in choosing.changing if errors}
    return Measurements(
        **{each.name: getattr(choosing, each.name) for each in fields(Choosing)},
        fitted=fitted,
        batch=batches[0],
        others=others,
        probe=probe,
        errors={path: SiteErrors(shapes[path], of) for path, of in with_refinement(every).items()},
        kept=KeptFits.beside(measured.path, measured.run),
        threads=measured.threads,
        condition=condition_of(layers),
    )


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
