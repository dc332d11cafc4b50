"""How much the error of a site moves the output of the model: measured by changing one part of one site at a time."""

import math
from collections.abc import Mapping, Sequence

from collab_heads.bars import progress_bar
from collab_heads.collaborative.fit import FitOptions
from collab_heads.collaborative.site_groups import CalibratedSites
from collab_heads.compression.choices import PARTS, Choice, Part
from collab_heads.compression.curves import QUICK, SiteCurves
from collab_heads.compression.fitting import fit_site, put
from collab_heads.compression.probe import Probe
from collab_heads.model.open_site import OpenSite
from collab_heads.model.undoing import undone
from collab_heads.numerics import few_threads

EXAMPLE = 0.1  # squared error of a site at which it is measured: as large as errors of interest are
REFINED_SITES = 4  # on which it is measured what refinement leaves of the errors of queries and keys


def sensitivities(
    sites: Sequence[OpenSite],
    curves: Mapping[str, SiteCurves],
    fitted: CalibratedSites,
    probe: Probe,
    options: FitOptions,
) -> dict[str, dict[Part, float]]:
    """Measure how the squared error of the model's output grows with that of each part of each site.

    Queries and keys are refined in the end, so their errors count as much less as a few sites show.

    Args:
        sites: those that may change; the model is as it was afterwards.
        curves: path -> its curves, of fits without refinement.
        fitted: what calibration saw.
        probe: measures the error of the output.
        options: of the final fits.

    Returns:
        path -> part -> squared error of the output, by squared error of the site.
    """

    def moved(site: OpenSite, choice: Choice, options: FitOptions) -> float:
        """The squared error of the output when one site has what a choice says."""
        with few_threads(site.dim_value):
            fit = fit_site(site, curves[site.path].shape, choice, fitted.of(site.path), options)
        with undone(site.model, [site]):
            put(site.model, site.adapter, {site.path: fit})
            return probe.error() ** 2

    found: dict[str, dict[Part, float]] = {}
    left: list[float] = []  # by refinement, of the squared errors of some sites
    refined = {site.path for site in sites[:: -(-len(sites) // REFINED_SITES)]} if options.refine_steps else set()
    for site in progress_bar(sites, desc="measuring sensitivities", leave=False):
        of_site, found[site.path] = curves[site.path], dict.fromkeys(PARTS, 0.0)
        for part in PARTS:
            if (choice := of_site.example(part, EXAMPLE)) is None:
                continue
            error = moved(site, choice, QUICK)
            found[site.path][part] = error / of_site.parts(choice)[part]
            if part == "query_key" and site.path in refined and error:
                left.append(min(moved(site, choice, options) / error, 1.0))
    for of_parts in found.values():
        of_parts["query_key"] *= math.prod(left) ** (1 / len(left)) if left else 1.0
    return found
