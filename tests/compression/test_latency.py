"""Times of sites: measured at a few sizes, interpolated between them."""

from types import SimpleNamespace

import numpy as np
import pytest
from compressing import batches_of, first_site
from opening import layers_of
from unchanged import assert_unchanged, snapshot

from collab_heads.compression import latency
from collab_heads.compression.latency import Latencies, Table, best_seconds, knots
from collab_heads.compression.measures import SiteUse, Workload
from collab_heads.compression.parts.shape import UNCHANGED, AttentionShape, Choice
from families import FAMILIES

BERT = FAMILIES["bert"]


def test_between_sizes_times_are_linear():
    shape = AttentionShape.of(first_site(BERT.build()), "per_head")
    axes = ([1, 4], [4, 8], [4, 8])
    grid = np.array(
        [[[heads + 10 * width + 100 * value for value in axes[2]] for width in axes[1]] for heads in axes[0]]
    )
    table = Table(axes, grid)
    assert table.seconds(shape, Choice.of(heads=2, query_key=4, values=4)) == pytest.approx(2 + 40 + 400)
    assert table.seconds(shape, UNCHANGED) == pytest.approx(4 + 80 + 800)
    assert table.seconds(shape, Choice.of(heads=1, values=6)) == pytest.approx(1 + 80 + 600)


def test_knots_hold_the_ends_and_the_whole():
    assert knots([4, 8, 12, 16, 20, 24, 28], 32) == [4, 16, 28, 32]
    assert knots([], 8) == [8]
    assert knots([4], 8) == [4, 8]
    assert knots(list(range(1, 16)), 16) == [1, 6, 11, 15, 16]


def test_every_shape_of_site_has_a_table_and_the_model_stays():
    family = FAMILIES["marian"]
    model = family.build()

    layers = layers_of(model)
    sites = layers.with_heads
    shapes = {site.path: AttentionShape.of(site, "per_head") for site in sites}
    before = snapshot(model)
    times = Latencies(SimpleNamespace(layers=layers, sites=sites, shapes=shapes, batch=batches_of(family, 1)[0]))
    assert_unchanged(model, before)
    assert {role for _, role in times.tables} == {"enc-self", "dec-self", "dec-enc"}
    use = SiteUse(shapes[sites[0].path], sites[0].role, Workload(1, 9, 9, 81))
    whole = times(use, UNCHANGED)
    assert whole > 0
    assert times(SiteUse(use.shape, use.role, Workload(3, 27, 27, 243)), UNCHANGED) == pytest.approx(3 * whole)


def test_sizes_are_timed_in_turns(monkeypatch):
    model = BERT.build()
    site = first_site(model)
    shape = AttentionShape.of(site, "per_head")
    choices = [UNCHANGED, Choice.of(heads=2), Choice.of(query_key=4, values=4)]
    seen, before = [], snapshot(model)

    def seconds(function):
        function()
        seen.append(function.args[0].num_heads)
        return 10.0 - len(seen)

    monkeypatch.setattr(latency, "best_seconds", seconds)
    found = latency.time_choices(layers_of(model), site, shape, choices, batches_of(BERT, 1)[0], 2)
    assert seen == [4, 2, 4] * 2 and found == [6, 5, 4]
    assert_unchanged(model, before)


def test_the_shortest_call_counts():
    calls = []
    assert 0 <= best_seconds(lambda: calls.append(1)) < 1
    assert len(calls) > latency.ROUNDS
