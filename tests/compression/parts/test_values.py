"""Narrow values are fitted quickly where they are measured, and only there."""

import pytest
import torch
from compressing import batches_of, first_site
from opening import layers_of

from collab_heads.calibration.calibrate import calibrate
from collab_heads.collaborative.plan import plan_values
from collab_heads.collaborative.replacement import fit_values
from collab_heads.compression.parts.part import QUICK
from collab_heads.compression.parts.shape import Choice, shape_of
from collab_heads.compression.parts.table import fit_site
from collab_heads.fitting.fit import FitOptions
from families import FAMILIES

WIDTH = 4  # of 8


@pytest.mark.parametrize("name", ("bert", "llama"))
def test_the_final_fit_is_not_the_quick_one(name):
    """Whatever the options of users are: these equal the quick ones."""
    model = FAMILIES[name].build()
    site, layers = first_site(model), layers_of(model)
    seen = calibrate(model, [site], [site], [site], batches_of(FAMILIES[name]))
    plan = plan_values(site, WIDTH * site.site.num_key_heads)
    expected = [fit_values(plan, seen.outputs[site.path], quick=quick).weights for quick in (False, True)]
    shape, choice = shape_of(site, "per_head"), Choice.of(values=WIDTH)
    fits = (
        fit_site(layers, site.path, shape, choice, seen.copied(), options)[-1].weights
        for options in (FitOptions(QUICK.method, QUICK.tol, QUICK.refine_steps), QUICK)
    )
    for found, same in zip(fits, expected, strict=True):
        assert torch.equal(found.value, same.value) and torch.equal(found.output, same.output)
    assert not torch.equal(expected[0].value, expected[1].value)
