"""How much the error of a site moves the output of the model: measured by changing one part of one site at a time."""

from collections.abc import Mapping, Sequence

from transformers.utils.logging import tqdm

from collab_heads.collaborative.calibrate import Calibrations
from collab_heads.compression.choices import PARTS, Part
from collab_heads.compression.curves import QUICK, SiteCurves
from collab_heads.compression.fitting import fit_site, put
from collab_heads.compression.probe import Probe
from collab_heads.model.open_site import OpenSite
from collab_heads.model.undoing import undone
from collab_heads.numerics import few_threads

EXAMPLE = 0.1  # squared error of a site at which it is measured: as large as errors of interest are


def sensitivities(
    sites: Sequence[OpenSite], curves: Mapping[str, SiteCurves], fitted: Calibrations, probe: Probe
) -> dict[str, dict[Part, float]]:
    """Measure how the squared error of the model's output grows with that of each part of each site.

    Args:
        sites: those that may change; the model is as it was afterwards.
        curves: path -> its curves.
        fitted: what calibration saw.
        probe: measures the error of the output.

    Returns:
        path -> part -> squared error of the output, by squared error of the site.
    """
    found: dict[str, dict[Part, float]] = {}
    for site in tqdm(sites, desc="measuring sensitivities", leave=False):
        site_curves, found[site.path] = curves[site.path], dict.fromkeys(PARTS, 0.0)
        for part in PARTS:
            example = site_curves.example(part, EXAMPLE)
            if example is None:
                continue
            with few_threads(site.dim_value):
                fit = fit_site(site, site_curves.shape, example, fitted, QUICK)
            with undone(site.model, [site]):
                put(site.model, site.adapter, {site.path: fit})
                found[site.path][part] = probe.error() ** 2 / site_curves.parts(example)[part]
    return found
