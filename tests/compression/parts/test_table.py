"""The errors of the parts of a site are what a fit makes of it on other examples."""

from dataclasses import replace

import pytest
import torch
from compressing import batches_of, first_block, first_site
from model_inputs import cast
from opening import layers_of

from collab_heads.calibration.calibrate import calibrate
from collab_heads.compression.parts.part import install
from collab_heads.compression.parts.query_key import QUICK
from collab_heads.compression.parts.shape import AttentionShape, shape_of
from collab_heads.compression.parts.table import PARTS, falling, fit_site, site_errors
from collab_heads.compression.sensitivities import SiteErrors
from collab_heads.model.apply_state import undone
from collab_heads.running.batches import run_batches, sides

EXACT_MOMENTS = 1e-6  # float64; errors seen: 4e-9
EXACT_CALLS = 1e-6  # the same, of recorded calls


def first_with(part, model):
    return (first_site if PARTS[part].shape is AttentionShape else first_block)(model)


@pytest.fixture
def measured(family, part):
    model = family.build().double().eval()
    site = first_with(part, model)
    attention = [site] if PARTS[part].shape is AttentionShape else []
    if family.name.startswith("albert"):
        pytest.skip("a module that several layers share sees other inputs once it has changed")
    fitted, held = ([cast(each, model.dtype) for each in batches_of(family, n, seed)] for n, seed in ((6, 0), (2, 1)))
    calibrations = [calibrate(model, attention, attention, [site], batches) for batches in (fitted, held)]
    return model, site, held, calibrations


def outputs_of(model, site, batches):
    """What a site puts out for the tokens of batches that count, call by call."""
    masks, kept = {}, []

    def keep(module, args, output):
        mask = masks.get(sides(site.site)[0])
        if mask is not None and output.ndim == 2:  # of all tokens in a row
            mask = mask.flatten()
        kept.append(output.flatten(0, 1) if mask is None else output[mask])

    handle = site.output.register_forward_hook(keep)
    run_batches(model, batches, masks, "test")
    handle.remove()
    return kept


@pytest.mark.parametrize("part", PARTS)
def test_an_error_is_what_the_site_then_makes(measured, part):
    model, site, held, (fitted, shown) = measured
    shape = shape_of(site, "per_head")
    taken = (replace(each, outputs=dict(each.outputs)) for each in (fitted, shown))  # what is used is taken out
    errors = SiteErrors(shape, site_errors(site, shape, *taken))
    before = outputs_of(model, site, held)
    choice = errors.example(part, 0.1)
    if choice is None:
        assert part == "query_key"
        pytest.skip("its queries and keys keep their width")
    layers = layers_of(model)
    fit = fit_site(layers, site.path, shape, choice, fitted.copied(), QUICK)
    with undone(layers, [site]) as tried:
        install(tried, {site.path: fit})
        after = outputs_of(model, first_with(part, model), held)
    moved = torch.cat(after) - torch.cat(before)
    if part == "query_key":  # from recorded calls, the variance around the mean of each
        tolerance, spread = EXACT_CALLS, torch.cat([each - each.mean(0) for each in before])
    else:  # from moments
        tolerance, spread = EXACT_MOMENTS, torch.cat(before) - torch.cat(before).mean(0)
    real = float(moved.square().sum() / spread.square().sum())
    expected = errors.of(choice)[part]
    assert 0 < expected <= 1
    assert min(real, 1.0) == pytest.approx(expected, rel=tolerance)


def test_more_is_never_worse():
    assert falling({8: 0.3, 4: 0.2, 12: 0.1}) == {4: 0.2, 8: 0.2, 12: 0.1}
