"""Times of sites: measured at a few sizes, interpolated between them."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from compressing import batches_of, first_site
from opening import layers_of
from served_outputs import ENGINE_NOISE
from unchanged import assert_unchanged, snapshot

from collab_heads import plan
from collab_heads.base.option_values import ENGINE_WORDS
from collab_heads.compression import latency
from collab_heads.compression.latency import Latencies, Table, best_seconds, knots
from collab_heads.compression.measures import SiteUse, Workload
from collab_heads.compression.parts.shape import UNCHANGED, AttentionShape, Choice, shape_of
from collab_heads.compression.parts.table import parts_of
from collab_heads.errors import ModelStateError
from collab_heads.serving.part_in_engine import ENGINES, in_engine
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
    assert knots(list(range(12)), 12) == [0, 1, 4, 8, 11, 12]  # nothing and one are timed apart
    assert knots([4, 8, 12, 16, 20, 24, 28], 32, 2) == [4, 28, 32]


def measured(model, batch, engine="torch", bits=(), sites=None):
    """What a plan measures of a model before it times sites."""
    layers = layers_of(model)
    sites = layers.in_order if sites is None else sites
    shapes = {site.path: shape_of(site, "per_head", bits=bits) for site in sites}
    options = SimpleNamespace(engine=engine)
    return SimpleNamespace(model=model, layers=layers, sites=sites, shapes=shapes, batch=batch, options=options)


def test_every_shape_of_site_has_a_table_and_the_model_stays():
    family = FAMILIES["marian"]
    model = family.build()
    before, seen = snapshot(model), measured(model, batches_of(family, 1)[0])
    times = Latencies(seen)
    assert_unchanged(model, before)
    assert {role for _, role, _ in times.tables} == {"enc-self", "dec-self", "dec-enc", "enc-ffn", "dec-ffn"}
    site = seen.sites[0]
    use = SiteUse(seen.shapes[site.path], site.role, Workload(1, 9, 9, 81))
    whole = times(use, UNCHANGED)
    assert whole > 0
    assert times(SiteUse(use.shape, use.role, Workload(3, 27, 27, 243)), UNCHANGED) == pytest.approx(3 * whole)


def test_sizes_are_timed_in_turns(monkeypatch):
    model = BERT.build()
    site = first_site(model)
    choices = [UNCHANGED, Choice.of(heads=2), Choice.of(query_key=4, values=4)]
    seen, before = [], snapshot(model)

    def seconds(function):
        function()
        seen.append(function.args[0].num_heads)
        return 10.0 - len(seen)

    monkeypatch.setattr(latency, "best_seconds", seconds)
    given = measured(model, batches_of(BERT, 1)[0], sites=[site])
    found = latency.time_choices(given, site, given.shapes[site.path], choices, 2)
    assert seen == [4, 2, 4] * 2 and found == [6, 5, 4]
    assert_unchanged(model, before)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ("onnxruntime", *ENGINE_WORDS[2:]))
@pytest.mark.parametrize("name", ("bert", "marian", "t5", "qwen3"))
def test_an_engine_computes_what_is_timed(name, engine, monkeypatch):
    """Each site is run at other sizes, in float and with few bits, as PyTorch runs it."""
    pytest.importorskip(ENGINES[engine].target if engine == "openvino" else "onnxruntime")
    family = FAMILIES[name]
    model = family.build()
    before, batch, tried, floats = snapshot(model), batches_of(family, 1)[0], [], []

    def checked(runs_in, call, modules, inputs, bits):
        graphs = in_engine(runs_in, call, modules, inputs, bits)
        wanted = call(*inputs)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for each, graph in zip(bits, graphs, strict=True):
            found = [torch.tensor(np.array(value)) for value in outputs_of(graph())]
            for value, expected in zip(found, wanted, strict=True):
                error = (value - expected).norm() / expected.norm()
                assert error < (ENGINE_NOISE if each is None else 0.3), (modules[0], each, error)
                floats.append(each is not None and error < ENGINE_NOISE)
            tried.append(each)
        return graphs

    monkeypatch.setattr(latency, "in_engine", checked)
    for site in {site.role: site for site in measured(model, batch).sites}.values():
        given = measured(model, batch, engine, (8, 4), [site])
        shape = given.shapes[site.path]
        sizes = {name: part.sizes(shape) for name, part in parts_of(shape).items()}
        smaller = Choice.of(**{name: each[-1] for name, each in sizes.items() if each})
        choices = [smaller, replace(smaller, bits=8), replace(smaller, bits=4)]
        assert all(seconds >= 0 for seconds in latency.time_choices(given, site, shape, choices, 1))
    assert set(tried) == {None, 8, 4} and not all(floats)
    assert_unchanged(model, before)


def outputs_of(found):
    return found if isinstance(found, list) else [found[place] for place in range(len(found))]


def test_an_engine_times_float32_on_the_processor():
    pytest.importorskip("onnxruntime")
    with pytest.raises(ModelStateError, match=r"weights in torch\.bfloat16 on cpu, and times are those of float32"):
        plan(BERT.build().bfloat16(), batches_of(BERT, 8), of="time", engine="onnxruntime")


@pytest.mark.slow
def test_what_is_gone_takes_no_time_in_an_engine():
    pytest.importorskip("onnxruntime")
    given = measured(BERT.build(), batches_of(BERT, 1)[0], "onnxruntime", (8,))
    times = Latencies(given)
    for site in given.sites[:2]:
        use = SiteUse(given.shapes[site.path], site.role, Workload(1, 9, 9, 81))
        none = Choice.of(neurons=0) if site.role == "enc-ffn" else Choice.of(heads=0)
        assert times(use, none) == 0 < times(use, UNCHANGED)
        assert times(use, Choice(bits=8)) > 0


def test_the_shortest_call_counts():
    calls = []
    assert 0 <= best_seconds(lambda: calls.append(1)) < 1
    assert len(calls) > latency.ROUNDS
