"""Recording: callbacks see what the model computes, at every site and in every state; nothing is left behind."""

import gc
import logging
import weakref

import pytest
import torch
from changed_heads import adapter_sites, emptied, output_projections
from heads_by_hand import (
    CHANGES,
    MEASURED,
    backends,
    layers_of,
    maps_by_hand,
    model_in,
    outputs_by_hand,
    sites_with_heads,
)
from model_inputs import cast
from model_runs import set_backend
from model_sizes import EXACT64, FP32_NOISE, HEAD_WIDTH, HEADS
from unchanged import assert_unchanged, refused, snapshot

import collab_heads
from collab_heads.contract import registry
from collab_heads.errors import UnsupportedModelError
from collab_heads.running.recording import recording
from families import FAMILIES

SIBLINGS = tuple(name for name in FAMILIES if name not in MEASURED)


def record(model, inputs, weights=True, outputs=True) -> tuple[dict, dict]:
    """path -> one tensor per call, of weights and of outputs."""
    seen = {}, {}

    def keep(found):
        return lambda site, tensor: found.setdefault(site.path, []).append(tensor)

    callbacks = {"weights": keep(seen[0]) if weights else None, "outputs": keep(seen[1]) if outputs else None}
    with torch.no_grad(), recording(model, **callbacks):
        model(**cast(inputs, model.dtype))
    return seen


def values_by_hand(model, inputs) -> dict[str, list[torch.Tensor]]:
    """path -> the values [B, H, S, d_v] of every site, one per call."""
    adapter, seen, handles = collab_heads.get_adapter(model), {}, []
    for site in sites_with_heads(model):

        def hook(module, args, output, site=site):
            seen.setdefault(site.path, []).append(output.unflatten(-1, (site.num_heads, -1)).transpose(1, 2))

        value = adapter.value_projection(model.base_model.get_submodule(site.path))
        handles.append(value.register_forward_hook(hook))
    with torch.no_grad():
        model(**cast(inputs, model.dtype))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", MEASURED)
def test_callbacks_see_what_the_model_computes(name, change):
    """Weights are those of `output_attentions`; weights times values are the outputs that enter W_O."""
    model, inputs = model_in(name, change), FAMILIES[name].inputs()
    before, own = snapshot(model), backends(model)
    weights, outputs = record(model, inputs)
    assert_unchanged(model, before)
    maps = maps_by_hand(model, inputs)
    assert backends(model) == own and set(own.values()) == {"sdpa" if model._supports_sdpa else "eager"}
    set_backend(model, "eager")
    values = values_by_hand(model, inputs)
    sites = sites_with_heads(model)
    assert weights.keys() == outputs.keys() == {site.path for site in sites}
    for site in sites:
        calls = len(layers_of(model, site))
        assert len(weights[site.path]) == len(outputs[site.path]) == len(maps[site.path]) == calls
        for seen, heads, expected, value in zip(*(d[site.path] for d in (weights, outputs, maps, values)), strict=True):
            assert torch.equal(seen, expected)
            assert heads.shape == (len(seen), seen.shape[2], site.num_heads, HEAD_WIDTH)
            torch.testing.assert_close(heads.transpose(1, 2), seen @ value, rtol=EXACT64, atol=EXACT64)


@pytest.mark.parametrize("name", SIBLINGS)
def test_siblings_record_as_well(name):
    model, inputs = model_in(name), FAMILIES[name].inputs()
    weights, _ = record(model, inputs, outputs=False)
    maps = maps_by_hand(model, inputs)
    assert len(weights) == FAMILIES[name].num_sites
    for path, expected in maps.items():
        assert all(torch.equal(a, b) for a, b in zip(weights[path], expected, strict=True))


@pytest.mark.parametrize("name", ("bert", "marian", "t5"))
def test_sites_without_heads_are_skipped(name):
    model, inputs = model_in(name, "pruned"), FAMILIES[name].inputs()
    stock = model_in(name)
    weights, outputs = record(model, inputs)
    paths = {site.path for site in adapter_sites(model)}
    assert emptied(stock) and weights.keys() == outputs.keys() == paths - emptied(stock)
    assert {tensor.shape[1] for each in weights.values() for tensor in each} - {HEADS}


@pytest.mark.parametrize("change", ("gated", "mixed"))
def test_outputs_are_those_before_gates_and_alphas(change):
    """In the first layer they are what they were before the change."""
    inputs = FAMILIES["bert"].inputs()
    stock, changed = model_in("bert"), model_in("bert")
    first, second = (site.path for site in adapter_sites(stock))
    CHANGES[change](changed)
    expected, found = (record(model, inputs, weights=False)[1] for model in (stock, changed))
    assert torch.equal(found[first][0], expected[first][0])
    assert not torch.allclose(found[second][0], expected[second][0])


@pytest.mark.parametrize("backend", ("sdpa", "eager"))
@pytest.mark.parametrize("name", ("bert", "marian", "t5"))
def test_outputs_alone_leave_the_backend(name, backend):
    model, inputs = model_in(name), FAMILIES[name].inputs()
    set_backend(model, backend)
    expected, seen = outputs_by_hand(model, inputs), {}

    def look(site, tensor):
        assert set(backends(model).values()) == {backend}
        seen[site.path] = tensor

    with torch.no_grad(), recording(model, outputs=look):
        model(**cast(inputs, model.dtype))
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[path], expected[path][0]) for path in seen)


def test_the_backend_is_eager_while_weights_are_recorded():
    model = model_in("t5")
    with recording(model, weights=lambda site, tensor: None):
        assert set(backends(model).values()) == {"eager"} and len(backends(model)) == 3
    assert set(backends(model).values()) == {"sdpa"}


@pytest.mark.parametrize("inner", ("encoder", "decoder"))
def test_every_stack_gets_its_own_backend_back(inner):
    model = model_in("t5")
    model.get_submodule(inner).set_attn_implementation("eager")
    own = backends(model)
    assert set(own.values()) == {"eager", "sdpa"}
    with recording(model, weights=lambda site, tensor: None):
        pass
    assert backends(model) == own


class BrokenError(Exception):
    pass


def fail(*args):
    raise BrokenError


@pytest.mark.parametrize("name", ("bert", "t5"))
@pytest.mark.parametrize("where", ("weights", "outputs", "body", "setting up"))
def test_an_error_leaves_nothing_behind(name, where, monkeypatch):
    model, inputs = model_in(name), FAMILIES[name].inputs()
    before, own, callbacks = snapshot(model), backends(model), {"weights": lambda *_: None, "outputs": lambda *_: None}
    adapter = collab_heads.get_adapter(model)
    if where == "setting up":
        last, find = adapter.sites(model)[-1], type(adapter).output_projection
        monkeypatch.setattr(
            type(adapter), "output_projection", lambda a, m, site: fail() if site == last else find(a, m, site)
        )
    elif where != "body":
        callbacks[where] = fail
    with pytest.raises(BrokenError), torch.no_grad(), recording(model, **callbacks):
        if where == "body":
            fail()
        model(**cast(inputs, model.dtype))
    assert_unchanged(model, before)
    assert backends(model) == own


def test_nothing_is_kept_after_a_callback():
    model, inputs, seen, most = model_in("bert"), FAMILIES["bert"].inputs(), [], []

    def look(site, tensor):
        seen.append(weakref.ref(tensor))
        most.append(sum(each() is not None for each in seen))

    with torch.no_grad(), recording(model, weights=look, outputs=look):
        for _ in range(3):
            model(**cast(inputs, model.dtype))
        gc.collect()
        assert len(seen) == 3 * 2 * 2
        assert not any(each() is not None for each in seen)
        assert max(most) <= 4  # of the site under way and the one before


def test_both_callbacks_hang_on_one_hook_per_site():
    model = model_in("marian")
    with recording(model, weights=fail, outputs=fail):
        hooks = [len(model.base_model.get_submodule(site.path)._forward_hooks) for site in adapter_sites(model)]
        inner = [len(projection._forward_pre_hooks) for projection in output_projections(model).values()]
    assert hooks == inner == [1] * 6


def test_the_switch_is_said_once(warnings_logged):
    model, inputs = model_in("t5"), FAMILIES["t5"].inputs()
    with warnings_logged.at_level(logging.INFO, logger="transformers"):
        for _ in range(2):
            set_backend(model, "sdpa")
            with torch.no_grad(), recording(model, weights=lambda *_: None):
                for _ in range(2):
                    model(**cast(inputs, model.dtype))
            set_backend(model, "eager")
            record(model, inputs)
    said = [line for line in warnings_logged.messages if "attention backend" in line]
    assert said == [said[0]] * 2  # once per recording that switches
    assert "T5ForConditionalGeneration uses the eager attention backend instead of sdpa" in said[0]


def test_weights_in_half_precision_and_on_every_backend():
    model, inputs = model_in("bert", "shared", torch.float32), FAMILIES["bert"].inputs()
    expected, _ = record(model, inputs)
    half = model_in("bert", "shared", torch.bfloat16)
    found, outputs = record(half, inputs)
    for path, (weights,) in expected.items():
        assert found[path][0].dtype == outputs[path][0].dtype == torch.bfloat16
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=FP32_NOISE)


def test_what_it_refuses(monkeypatch):
    model, inputs = model_in("bert"), FAMILIES["bert"].inputs()

    class Elsewhere(type(collab_heads.get_adapter(model))):
        weights_at = 0

    path = adapter_sites(model)[0].path
    monkeypatch.setitem(registry._ADAPTERS, "bert", Elsewhere())
    with refused(model, UnsupportedModelError, path, "no attention weights of 4 heads", "(3, 9, 32)", "weights_at"):
        with torch.no_grad(), recording(model, weights=fail):
            model(**cast(inputs, model.dtype))
    monkeypatch.undo()
    with pytest.raises(UnsupportedModelError, match="DataParallel"), recording(torch.nn.DataParallel(model)):
        pass
