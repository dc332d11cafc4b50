"""All that is measured of a model before anything is planned."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from collab_heads.attention_adapter import AttentionAdapter
from collab_heads.bars import progress_bar
from collab_heads.collaborative.fit import FitOptions
from collab_heads.collaborative.kinds import FITS
from collab_heads.collaborative.site_groups import CalibratedSites
from collab_heads.compression.choices import Part, SiteShape
from collab_heads.compression.curves import SiteCurves, site_curves
from collab_heads.compression.held_out import hold_out
from collab_heads.compression.probe import Probe
from collab_heads.compression.sensitivity import sensitivities
from collab_heads.errors import CalibrationError, SwapError
from collab_heads.heads.prune import check_prunable
from collab_heads.layers.output import HeadOutputProjection
from collab_heads.model.open_site import OpenSite, open_sites
from collab_heads.model.refusals import check_swappable, check_values
from collab_heads.numerics import few_threads
from collab_heads.sites import select_sites
from collab_heads.state import QueryKeyKind


@dataclass(frozen=True, eq=False)
class Evidence:
    """What was measured of a model.

    Attributes:
        model: the model, unchanged.
        adapter: its adapter.
        sites: those that may change.
        options: how queries and keys are fitted in the end.
        fitted: what calibration saw on the examples to fit to.
        probe: measures how far the output of the model moves, on examples that no fit sees.
        curves: path -> squared errors of the site.
        sensitivity: path -> part -> squared error of the output by that of the site.
    """

    model: PreTrainedModel
    adapter: AttentionAdapter
    sites: list[OpenSite]
    options: FitOptions
    fitted: CalibratedSites
    probe: Probe
    curves: Mapping[str, SiteCurves]
    sensitivity: Mapping[str, Mapping[Part, float]]


def gather(
    model: PreTrainedModel,
    adapter: AttentionAdapter,
    batches: Iterable[Mapping],
    names: str | Iterable[str] | None,
    kind: QueryKeyKind,
    parts: tuple[Part, ...],
    options: FitOptions,
) -> Evidence:
    """Measure a model, which is left as it was; the errors of `plan`."""
    sites = choose_sites(model, adapter, names)
    may_narrow = FITS[kind].capability in adapter.capabilities
    stock = [site for site in sites if may_narrow and not site.is_swapped]
    batches, held = hold_out(batches)
    fitted = CalibratedSites(model, stock, stock, sites, batches)
    shown = CalibratedSites(model, stock, stock, sites, held)
    probe = Probe(model, held, sites)
    if max(probe.keys.values()) <= 1:
        raise CalibrationError("the calibration examples hold one token each, which attends to itself: pass sentences")
    with few_threads(max(site.dim_value for site in sites)):
        curves = {
            site.path: site_curves(site, SiteShape.of(site, kind, parts), fitted.of(site.path), shown.of(site.path))
            for site in progress_bar(sites, desc="measuring sites", leave=False)
        }
    del shown  # as large as what was seen of the examples to fit to
    sensitivity = sensitivities(sites, curves, fitted, probe, options)
    return Evidence(model, adapter, sites, options, fitted, probe, curves, sensitivity)


def choose_sites(
    model: PreTrainedModel, adapter: AttentionAdapter, names: str | Iterable[str] | None
) -> list[OpenSite]:
    """The named sites that have heads, if all of them can be changed.

    Raises:
        ArgumentError: if a name is neither a role nor a path of the model.
        SwapError: if a site has gates or alphas, or cannot be changed safely.
    """
    available = adapter.sites_with_heads(model)
    if not available:
        raise SwapError("the model has no heads left: there is nothing to compress")
    sites = open_sites(model, adapter, select_sites(available, names))
    check_prunable(model, adapter, sites)
    check_swappable(model, adapter, [site for site in sites if not site.is_swapped])
    check_values(model, adapter, sites)
    for site in sites:
        if isinstance(site.output, HeadOutputProjection):
            what = "gates" if site.output.gates is not None else "alphas"
            raise SwapError(
                f"{site.path} has {what}, whose heads are still being chosen: prune_heads(model) first, or "
                "fold_heads(model) to keep all heads"
            )
    return sites
