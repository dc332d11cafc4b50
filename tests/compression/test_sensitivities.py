"""How much the errors of sites move the output, and what refinement leaves of them."""

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from compressing import first_site
from opening import layers_of

from collab_heads.compression import sensitivities
from collab_heads.compression.parts.part import QUICK
from collab_heads.compression.parts.shape import AttentionShape
from collab_heads.compression.sensitivities import SiteErrors
from collab_heads.fitting.fit import FitOptions
from collab_heads.model.open_layers import OpenSite
from families import FAMILIES

SQUARES = {"heads": 0.1, "query_key": 0.2, "values": 0.4}  # of a site, by part


class SimpleOpenSite(OpenSite):
    """A site of which there may be any number."""

    output = torch.nn.Linear(8, 8)


def measured(monkeypatch, outputs, refined, steps, sites=6):
    """The sensitivities of sites that move the output by what is said; the paths of those that were refined."""
    shape, tried = AttentionShape.of(first_site(FAMILIES["bert"].build()), "per_head"), []
    errors = SiteErrors(shape, {"heads": {2: 0.1}, "query_key": {4: 0.2}, "values": {4: 0.4}})

    def fit_site(layers, path, shape, choice, calibrations, options):
        tried.append((path, choice, options))

    def error():
        path, choice, options = tried[-1]
        part = next(part for part in SQUARES if errors.of(choice)[part])
        return math.sqrt(outputs[part] * (1.0 if options is QUICK else refined[path]))

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
    every = {site.path: those.measure(site, errors, None) for site in fake}
    return sensitivities.with_refinement(every), [path for path, _, options in tried if options is not QUICK]


def test_an_error_of_the_output_counts_by_that_of_the_site(monkeypatch):
    outputs = {"heads": 0.3, "query_key": 0.5, "values": 0.2}
    found, refined = measured(monkeypatch, outputs, {}, steps=0)
    assert not refined and len(found) == 6
    for of_site in found.values():
        assert of_site == pytest.approx({part: outputs[part] / SQUARES[part] for part in SQUARES})


def test_errors_of_queries_and_keys_count_as_much_less_as_refinement_leaves(monkeypatch):
    outputs, left = {"heads": 0.3, "query_key": 0.5, "values": 0.2}, {"0": 0.25, "2": 0.5, "4": 4.0}
    found, refined = measured(monkeypatch, outputs, left, steps=3)
    assert refined == ["0", "2", "4"]  # every second of six
    for of_site in found.values():
        assert of_site["query_key"] == pytest.approx(0.5 / 0.2 * (0.25 * 0.5 * 1.0) ** (1 / 3))  # never made worse
        assert of_site["values"] == pytest.approx(0.2 / 0.4) and of_site["heads"] == pytest.approx(0.3 / 0.1)
