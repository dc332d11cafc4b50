"""Sites that are calibrated a few at a time: what is seen, and so what comes out, is the same."""

import weakref
from collections import defaultdict

import pytest
import torch
from compressing import batches_of
from model_sizes import EXACT, WIDTH
from opening import layers_of
from slow_cases import slow

from collab_heads import compress, plan, swap_to_collaborative
from collab_heads.calibration import calibrate
from collab_heads.calibration.calibrate import CalibratedSites, grouped, moment_counts, most_bytes
from collab_heads.compression import fitting
from collab_heads.errors import CalibrationError
from collab_heads.fitting import neuron_regression
from collab_heads.running.batches import num_rows
from families import FAMILIES


@pytest.mark.parametrize(
    "limit, expected",
    ((100, [["a", "b", "c", "d"]]), (5, [["a", "b"], ["c"], ["d"]]), (0, [["a"], ["b"], ["c"], ["d"]])),
)
def test_groups_keep_the_order_and_to_the_limit(limit, expected):
    assert grouped({"a": 2, "b": 3, "c": 4, "d": 9}, limit) == expected


def weights(model) -> dict:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def passes(model) -> list:
    """Grows with every batch that a model sees."""
    seen: list = []
    model.register_forward_pre_hook(lambda *_: seen.append(1))
    return seen


CHANGES = {
    "swap": lambda model, batches: swap_to_collaborative(
        model, dim_shared_query_key=16, dim_value=16, batches=iter(batches), refine_steps=3
    ),
    "balanced": lambda model, batches: swap_to_collaborative(
        model, dim_shared_query_key=16, allocation="balanced", batches=iter(batches), refine_steps=0
    ),
    "compress": lambda model, batches: compress(model, batches, 0.5, refine_steps=2),
}


@pytest.mark.parametrize("change", [*list(CHANGES)[:-1], *slow("compress")])
@pytest.mark.parametrize("family", ("bert", *slow("marian")))
def test_groups_of_one_do_what_one_group_does(change, family, monkeypatch):
    together, apart = FAMILIES[family].build(), FAMILIES[family].build()
    batches, seen = batches_of(FAMILIES[family], 12), (passes(together), passes(apart))
    CHANGES[change](together, batches)
    monkeypatch.setattr(calibrate, "SHARE", 0)
    monkeypatch.setattr(calibrate, "LEAST", 0)
    CHANGES[change](apart, batches)
    expected = weights(together)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(apart).items())
    assert len(seen[1]) > len(seen[0])


def test_what_is_held_is_one_group(monkeypatch):
    monkeypatch.setattr(calibrate, "LEAST", 0)
    monkeypatch.setattr(calibrate, "SHARE", 0)
    model = FAMILIES["bert"].build()
    sites = layers_of(model).with_heads
    assert moment_counts(sites, sites) == {site.path: 2 * WIDTH**2 + EXACT**2 for site in sites}
    calibrated = CalibratedSites(model, sites, [], sites, batches_of(FAMILIES["bert"], 2))
    for site in sites:
        assert list(calibrated.of(site.path).outputs) == list(calibrated.of(site.path).query_key) == [site.path]


@pytest.mark.slow
def test_no_group_outlives_its_turn(monkeypatch):
    """Nobody who uses a group keeps it while the next one is calibrated, or while last projections are refitted."""
    monkeypatch.setattr(calibrate, "LEAST", 0)
    monkeypatch.setattr(calibrate, "SHARE", 0)
    held, counts = defaultdict(list), []
    calibrated, fitted_in_order = CalibratedSites.calibrated, fitting.fitted_in_order

    def watched(self, group):
        counts.append(sum(moments() is not None for moments in held[id(self)]))
        found = calibrated(self, group)
        held[id(self)] += map(weakref.ref, found.outputs.values())
        return found

    def refitted(measured, fitted, choices):
        measured.fitted.release()
        counts.append(sum(moments() is not None for each in held.values() for moments in each))
        return fitted_in_order(measured, fitted, choices)

    monkeypatch.setattr(CalibratedSites, "calibrated", watched)
    monkeypatch.setattr(fitting, "fitted_in_order", refitted)
    CHANGES["compress"](FAMILIES["bert"].build(), batches_of(FAMILIES["bert"], 12))
    assert len(counts) > 6 and set(counts) == {0}


@pytest.mark.parametrize("are_one", (True, False))
def test_released_moments_are_made_again(are_one, monkeypatch):
    """One group stays: to make it again would take a pass, and it is small."""
    model = FAMILIES["bert"].build()
    sites = layers_of(model).with_heads
    batches, path = batches_of(FAMILIES["bert"], 2), sites[-1].path
    expected = CalibratedSites(model, sites, [], sites, batches).of(path).outputs[path].outer
    if not are_one:
        monkeypatch.setattr(calibrate, "LEAST", 0)
        monkeypatch.setattr(calibrate, "SHARE", 0)
    calibrated = CalibratedSites(model, sites, [], sites, batches)
    assert calibrated.of(path).outputs
    calibrated.release()
    assert bool(calibrated.seen.outputs) is are_one
    assert torch.equal(calibrated.of(path).outputs[path].outer, expected)


@pytest.mark.parametrize("are_one", (True, False))
def test_taken_moments_are_made_again(are_one, monkeypatch):
    """Those of one group stay, as when they are released; others are made again on request."""
    model = FAMILIES["marian"].build()
    sites = layers_of(model).with_heads
    if not are_one:
        monkeypatch.setattr(calibrate, "SHARE", 0)
        monkeypatch.setattr(calibrate, "LEAST", 0)
    calibrated = CalibratedSites(model, sites, [], sites, batches_of(FAMILIES["marian"], 2))
    first, second = (site.path for site in sites[-2:])  # both in one block of the decoder
    assert calibrated.groups[-1][-2:] == [first, second]
    expected = calibrated.of(first).outputs[first].outer.clone()
    taken = calibrated.take(first)
    assert list(taken.outputs) == list(taken.query_key) == [first] and taken.orders is calibrated.orders
    taken.outputs.clear()
    for held in (calibrated.seen.outputs, calibrated.seen.query_key):
        assert (first in held) is are_one and second in held
    assert torch.equal(calibrated.of(first).outputs[first].outer, expected)
    assert second in calibrated.seen.outputs


def test_moments_of_neurons_are_freed_while_errors_are_measured(monkeypatch):
    monkeypatch.setattr(calibrate, "SHARE", 0)
    monkeypatch.setattr(calibrate, "LEAST", 0)
    alive, calibrated = [], CalibratedSites.calibrated
    held = defaultdict(list)

    def watched(self, group):
        found = calibrated(self, group)
        held[id(self)] = [weakref.ref(moments) for moments in found.outputs.values()]
        return found

    def counting(function):
        def counted(matrix):
            alive.append(sum(moments() is not None for each in held.values() for moments in each))
            return function(matrix)

        return counted

    monkeypatch.setattr(CalibratedSites, "calibrated", watched)
    for name in ("positive_inverse_", "cholesky_"):
        monkeypatch.setattr(neuron_regression, name, counting(getattr(neuron_regression, name)))
    family = FAMILIES["bert"]
    model = family.build()
    plan(model, batches_of(family, 12), parts="neurons", refine_steps=0)
    layers = model.config.num_hidden_layers  # per block: the order, with the moments to measure on; then the errors
    assert alive[: 2 * layers] == [1, 0] * layers
    assert len(alive) == 2 * layers  # the orders are kept for the fits that follow


def test_groups_are_smaller_where_examples_are_few(monkeypatch):
    model = FAMILIES["bert"].build()
    sites, batches = layers_of(model).with_heads, batches_of(FAMILIES["bert"], 2)
    whole = 8 * sum(moment_counts(sites, sites).values())
    monkeypatch.setattr(calibrate, "SHARE", 0)
    monkeypatch.setattr(calibrate, "LEAST", whole)
    groups = [len(CalibratedSites(model, sites, [], sites, batches, are_held_out=few).groups) for few in (False, True)]
    assert groups == [1, len(sites)] and most_bytes(0, are_few=True) == whole / 4
    monkeypatch.setattr(calibrate, "SHARE", 0.25)
    assert (most_bytes(8 * whole), most_bytes(8 * whole, are_few=True)) == (2 * whole, whole / 2)


@pytest.mark.parametrize("name", ("bert", "marian"))
def test_calls_are_kept_of_some_examples_and_moments_taken_of_all(name, monkeypatch):
    model = FAMILIES[name].build().double()
    sites, batches = layers_of(model).with_heads, batches_of(FAMILIES[name], 5)
    whole = CalibratedSites(model, sites, sites, sites, batches)
    monkeypatch.setattr(calibrate, "RECORDED", 2 * num_rows(batches[0]))
    thinned = CalibratedSites(model, sites, sites, sites, batches)
    assert (whole.step, thinned.step) == (1, 3)
    for path in (site.path for site in sites):
        every, some = whole.of(path), thinned.of(path)
        assert [len(seen.query_key[path].calls) for seen in (every, some)] == [5, 2]
        for side in ("query", "key"):
            expected, found = (getattr(seen.query_key[path], side) for seen in (every, some))
            assert found.count == expected.count
            torch.testing.assert_close(found.outer, expected.outer, rtol=1e-12, atol=1e-9)
        torch.testing.assert_close(some.outputs[path].outer, every.outputs[path].outer, rtol=1e-12, atol=1e-9)


def test_no_batches_are_an_error_before_anything_changes():
    model = FAMILIES["bert"].build()
    before = weights(model)
    with pytest.raises(CalibrationError, match="empty"):
        swap_to_collaborative(model, dim_shared_query_key=16, batches=iter(()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(model).items())


def test_heads_that_share_values_are_counted_one_by_one():
    """Moments are of what heads put out, however few value heads they have."""
    model = FAMILIES["qwen3"].build()
    sites = layers_of(model).with_heads
    calibrated = CalibratedSites(model, [], [], sites, batches_of(FAMILIES["qwen3"], 1))
    for path, count in moment_counts([], sites).items():
        assert count == calibrated.of(path).outputs[path].outer.numel() == EXACT**2
