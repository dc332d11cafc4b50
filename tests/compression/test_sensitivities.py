"""How much the errors of sites move the output, and what refinement leaves of them."""

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from compressing import first_site
from opening import layers_of

from collab_heads.calibration.calibrate import Calibrations
from collab_heads.compression import sensitivities
from collab_heads.compression.measured_sites import MeasuredPart
from collab_heads.compression.parts.part import QUICK
from collab_heads.compression.parts.shape import AttentionShape
from collab_heads.compression.sensitivities import SiteErrors
from collab_heads.fitting.fit import FitOptions
from collab_heads.model.open_layers import OpenSite
from families import FAMILIES

SQUARES = {"heads": {2: 0.1}, "query_key": {4: 0.9, 8: 0.2}, "values": {4: 0.9, 8: 0.2}}  # of a site
OUTPUTS = {"heads": {2: 0.3}, "query_key": {4: 3.6, 8: 0.5}, "values": {8: 0.2}}  # of the model, with it


class SimpleOpenSite(OpenSite):
    """A site of which there may be any number."""

    output = torch.nn.Linear(8, 8)


def measured(monkeypatch, refined, steps, sites=6):
    """The squared errors of the output by size, where sites move it by what is said; the paths of refined sites."""
    shape, tried = AttentionShape.of(first_site(FAMILIES["bert"].build()), "per_head"), []
    errors = SiteErrors(shape, SQUARES)

    def fit_site(layers, path, shape, choice, calibrations, options):
        tried.append((path, choice, options))

    def error():
        path, choice, options = tried[-1]
        ((part, size),) = choice.sizes
        return math.sqrt(OUTPUTS[part][size] * (1.0 if options is QUICK else refined[path]))

    for name, stub in {"fit_site": fit_site, "install": lambda *_: None, "undone": lambda *_: nullcontext()}.items():
        monkeypatch.setattr(sensitivities, name, stub)
    layers = layers_of(FAMILIES["bert"].build())
    one = layers.attention[0]
    fake = [
        SimpleOpenSite(replace(one.site, path=str(i)), one.module, one.adapter, one.model, one.state)
        for i in range(sites)
    ]
    probe = SimpleNamespace(error=error, starts=lambda _: SimpleNamespace(advance=str, at=nullcontext))
    those = sensitivities.Sensitivities(layers, fake, probe, FitOptions(refine_steps=steps))
    every = {site.path: those.measure(site, errors, Calibrations()) for site in fake}
    return sensitivities.with_refinement(every), [path for path, _, options in tried if options is not QUICK]


def test_an_error_of_the_output_counts_by_that_of_the_site(monkeypatch):
    """Of values in proportion; the smallest width of queries and keys is tried itself, for its effect grows faster."""
    found, refined = measured(monkeypatch, {}, steps=0)
    assert not refined and len(found) == 6
    for of_site in found.values():
        assert of_site["heads"] == {2: pytest.approx(0.3)}
        assert of_site["query_key"] == pytest.approx({4: 3.6, 8: 0.5})
        assert of_site["values"] == pytest.approx({4: 0.9, 8: 0.2})


def test_errors_of_queries_and_keys_count_as_much_less_as_refinement_leaves(monkeypatch):
    left = {"0": 0.25, "2": 0.5, "4": 4.0}
    found, refined = measured(monkeypatch, left, steps=3)
    assert refined == ["0", "2", "4"]  # every second of six
    for of_site in found.values():
        share = (0.25 * 0.5 * 1.0) ** (1 / 3)  # never made worse
        assert of_site["query_key"] == pytest.approx({4: 3.6 * share, 8: 0.5 * share})
        assert of_site["values"] == pytest.approx({4: 0.9, 8: 0.2}) and of_site["heads"] == {2: pytest.approx(0.3)}


def test_between_two_measured_sizes_the_factor_changes_evenly():
    """And beyond them it stays what it is there."""
    errors = {4: 1.0, 8: 0.55, 12: 0.1, 16: 0.02, 20: 0.0}
    found = MeasuredPart(errors, {12: 0.1 * 2.0, 4: 1.0 * 5.0}).effects()
    assert found == pytest.approx({4: 5.0, 8: 0.55 * 3.5, 12: 0.2, 16: 0.04, 20: 0.0})
    assert MeasuredPart(errors, {12: 0.2}).effects() == pytest.approx({size: 2 * each for size, each in errors.items()})
    assert MeasuredPart(errors).effects() == dict.fromkeys(errors, 0.0)
