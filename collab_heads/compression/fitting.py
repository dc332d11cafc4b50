"""Fit the choices of a plan, and measure the error of the model's output with them; the model stays as it is."""

from collections.abc import Mapping, Sequence

from collab_heads.base.numerics import few_threads
from collab_heads.base.progress import progress_bar
from collab_heads.compression.measurements import Measurements
from collab_heads.compression.parts.part import Fit, install
from collab_heads.compression.parts.shape import UNCHANGED, Choice
from collab_heads.compression.parts.table import fit_site
from collab_heads.compression.sequential_refit import refitted_in_order
from collab_heads.layers.layout import widths
from collab_heads.model.apply_state import undone


def fit_choices(measured: Measurements, choices: Mapping[str, Choice]) -> dict[str, list[Fit]]:
    """Fit choices for sites: path -> fits of every site that changes; the model stays as it is.

    The last projections are then refitted in the order of the sites (see `sequential_refit`). This is kept if it
    reduces the error of the output on the examples that are held out.

    Args:
        measured: the measurements of the model.
        choices: path -> choice, for all sites that may change.
    """
    layers, options, fitted = measured.layers, measured.options.fit, {}
    changing = [site for site in measured.sites if choices[site.path] != UNCHANGED]
    for site in progress_bar(changing, desc="fitting sites"):
        path, shape = site.path, measured.shapes[site.path]
        with few_threads(widths(site.output)[0]):  # a name for the calibration would keep it in memory
            fitted[path] = fit_site(layers, path, shape, choices[path], measured.fitted.of(path), options)
    refitted = refitted_in_order(measured, fitted)
    return refitted if refitted and fitted_error(measured, refitted) < fitted_error(measured, fitted) else fitted


def fitted_error(measured: Measurements, fitted: Mapping[str, Sequence[Fit]]) -> float:
    """Install some fits, measure the error of the model's output, and remove them again.

    Args:
        measured: the measurements of the model.
        fitted: path -> fits, as `fit_choices` returns them.
    """
    with undone(measured.layers, measured.sites) as tried:
        install(tried, fitted)
        return measured.probe.error()
