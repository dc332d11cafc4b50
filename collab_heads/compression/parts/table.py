"""The table of parts, and the choices, sizes, errors and fits of a site that follow from it."""

import functools
import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from collab_heads.base.option_values import SitePart
from collab_heads.calibration.calibrate import Calibrations
from collab_heads.compression.parts.heads import Heads
from collab_heads.compression.parts.neurons import Neurons
from collab_heads.compression.parts.part import Fit, Fitting, Part
from collab_heads.compression.parts.query_key import QueryKeys
from collab_heads.compression.parts.shape import Choice, Shape
from collab_heads.compression.parts.values import Values
from collab_heads.fitting.fit import FitOptions
from collab_heads.model.open_layers import OpenLayers, OpenLayerSite
from collab_heads.model.site_size import SiteSize, size_of

# In the order in which they are fitted: each sees what those before it leave.
PARTS: dict[SitePart, Part] = {part.name: part for part in (Heads(), QueryKeys(), Values(), Neurons())}


def parts_of(shape: Shape) -> dict[SitePart, Part]:
    """Return the parts that sites of a shape have."""
    return {name: part for name, part in PARTS.items() if isinstance(shape, part.shape)}


def wholes_of(shape: Shape) -> dict[SitePart, int]:
    """Return the size that each part of a site has."""
    return {name: part.whole(shape) for name, part in parts_of(shape).items()}


def resized(shape: Shape, choice: Choice) -> Any:
    """Return the geometry of a site with a choice."""
    geometry = shape.geometry
    for part in parts_of(shape).values():
        geometry = part.resized(shape, choice, geometry)
    return geometry if choice.bits is None else replace(geometry, bits=choice.bits)


@functools.lru_cache(maxsize=1 << 16)
def size_with(shape: Shape, choice: Choice) -> SiteSize:
    """Return the size of a site with a choice."""
    return size_of(resized(shape, choice))


def choices_of(shape: Shape) -> Iterator[Choice]:
    """Yield all choices of a site; the site as it is comes last."""
    parts = parts_of(shape)
    for sizes in itertools.product(*([*part.sizes(shape), None] for part in parts.values())):
        choice = Choice.of(**dict(zip(parts, sizes, strict=True)))
        geometry = resized(shape, choice)
        widths = zip(shape.geometry.inner_widths, geometry.inner_widths, strict=True)
        if any(now != was and now % shape.multiple_of for was, now in widths):
            continue
        if all(part.allows(shape, choice, geometry) for part in parts.values()):
            yield from (replace(choice, bits=bits) for bits in (shape.bits if 0 not in sizes else ()))
            yield choice


def site_errors(
    site: OpenLayerSite, shape: Shape, fitted: Calibrations, held: Calibrations
) -> dict[str, dict[int, float]]:
    """Measure the error of each part of a site at each size: part -> size -> squared error, by rising size.

    For the arguments see `Part.errors`.
    """
    return {name: falling(part.errors(site, shape, fitted, held)) for name, part in parts_of(shape).items()}


def falling(errors: Mapping[int, float]) -> dict[int, float]:
    """Cap each error at that of the next smaller size: a larger size can hold a smaller one, so more error is noise."""
    sizes = sorted(errors)
    return dict(zip(sizes, itertools.accumulate((errors[size] for size in sizes), min), strict=True))


def fit_site(
    layers: OpenLayers, path: str, shape: Shape, choice: Choice, calibrations: Calibrations, options: FitOptions
) -> list[Fit]:
    """Fit a choice for a site; the model is unchanged afterwards.

    Args:
        layers: the layers of the model.
        path: the path of the site, which has no gates or alphas.
        shape: its shape.
        choice: the choice to fit.
        calibrations: the calibration of the unchanged model, from which the fit takes out what it uses.
        options: how queries and keys are fitted.
    """
    with ExitStack() as stack:
        fitting = Fitting(layers, path, shape, choice, resized(shape, choice), calibrations, options, stack)
        for name, _ in choice.sizes:
            PARTS[name].fit(fitting)
        return fitting.fits
