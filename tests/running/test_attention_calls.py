"""What is recorded of a site suffices to compute its output; the sample is even and bounded; nothing is left behind."""

import itertools

import pytest
import torch
from changed_heads import changed
from model_inputs import cast
from model_sizes import EXACT64
from transformers import BertModel
from unchanged import assert_unchanged, refused, snapshot

import collab_heads
from collab_heads.errors import CalibrationError
from collab_heads.layers.query_key_kinds import exact_query_key
from collab_heads.model.open_layers import OpenLayers
from collab_heads.running import attention_calls
from collab_heads.running.attention_calls import Call, Recorder, recording_calls
from collab_heads.running.batches import run_batches
from families import FAMILIES


def run(model, inputs, limit=attention_calls.SAMPLE_BYTES, batches=1):
    """The recorder of one run over all sites, and the sites."""
    adapter, masks = collab_heads.get_adapter(model), {}
    found = adapter.sites(model)
    with recording_calls(model, OpenLayers.of(model, adapter).attention, masks, limit) as recorder:
        run_batches(model, [inputs] * batches, masks, "recording")
    return recorder, found


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.shares])
def test_calls_give_the_output_of_the_site(name):
    """Scores from the recorded inputs and biases, weights and values, up to what reaches the output projection."""
    assert_calls_suffice(FAMILIES[name], FAMILIES[name].build().double())


@torch.no_grad()
@pytest.mark.parametrize("name", ("t5-encoder", "mpnet"))
def test_of_fewer_heads_the_position_bias_is_theirs(name):
    assert_calls_suffice(FAMILIES[name], changed(FAMILIES[name], None, "pruned", empty=False))


@torch.no_grad()
@pytest.mark.parametrize("kept", (None, [1, 3]))
@pytest.mark.parametrize("name", ("deberta-v2", "deberta-v2-far"))
def test_terms_of_positions_are_what_is_added_to_scores(name, kept):
    model, inputs = FAMILIES[name].build().double(), FAMILIES[name].inputs()
    adapter = collab_heads.get_adapter(model)
    if kept is not None:
        collab_heads.prune_heads(model, heads={site.path: kept for site in adapter.sites(model)})
    recorder, found = run(model, inputs)
    maps = model(**inputs, output_attentions=True).attentions
    for site, expected in zip(found, maps, strict=True):
        weights, (call,) = adapter.read(model.base_model.get_submodule(site.path)), recorder.calls_of(site.path)
        query = call.query_inputs[:, None] @ weights.query.mT + weights.query_bias[:, None]
        key = call.key_inputs[:, None] @ weights.key.mT + weights.key_bias[:, None]
        scores = sum(call.biases, query @ key.mT * weights.scale)
        torch.testing.assert_close(scores.softmax(-1), expected, rtol=0, atol=1e-12)


def assert_calls_suffice(family, model):
    adapter, inputs, heads = collab_heads.get_adapter(model), cast(family.inputs(), torch.float64), {}
    handles = [
        adapter.output_projection(model, site).register_forward_pre_hook(
            lambda _, args, path=site.path: heads.setdefault(path, []).append(args[0])
        )
        for site in adapter.sites(model)
    ]
    recorder, found = run(model, inputs)
    for handle in handles:
        handle.remove()
    for site in found:
        weights = adapter.read(model.base_model.get_submodule(site.path))
        assert weights.num_heads == site.num_heads
        exact, value = exact_query_key(weights), weights.value
        calls = recorder.calls_of(site.path)
        assert len(calls) == len(heads[site.path])
        for call, expected in zip(calls, heads[site.path], strict=True):
            scores = weights.scale * exact.scores(call.query_inputs, call.key_inputs)
            attention = sum(call.biases, scores).softmax(-1)
            ours = torch.einsum("bhts,bsd,hvd->bthv", attention, call.key_inputs, value)
            if weights.value_bias is not None:
                ours = ours + weights.value_bias
            used = torch.ones(ours.shape[:2], dtype=torch.bool) if call.used is None else call.used
            torch.testing.assert_close(ours.flatten(-2)[used], expected[used], rtol=0, atol=EXACT64)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_is_left_as_it_was(name):
    family = FAMILIES[name]
    model = family.build().train()
    before = snapshot(model)
    recorder, found = run(model, family.inputs())
    assert_unchanged(model, before)
    assert not attention_calls.RECORDED
    # a reused module is called once per layer
    assert sum(len(recorder.calls_of(site.path)) for site in found) == family.num_maps
    calls = [call for site in found for call in recorder.calls_of(site.path)]
    assert not any(call.query_inputs.requires_grad or call.key_inputs.requires_grad for call in calls)


@pytest.mark.parametrize("name", ("bert", "mpnet"))
def test_the_model_is_left_as_it_was_after_an_error(name):
    model = FAMILIES[name].build()
    before = snapshot(model)
    with pytest.raises(collab_heads.CollabHeadsError):
        run(model, {"input_ids": torch.full((1, 3), 10**6)})
    assert_unchanged(model, before)
    assert not attention_calls.RECORDED


def call_of(size):
    """A call whose inputs have `size` bytes."""
    inputs = torch.zeros(1, 1, size // 4)
    return Call(inputs, inputs, (), None)


def test_the_sample_is_even_and_bounded():
    site = collab_heads.AttentionSite("a", "enc-self", 0, 1)
    recorder = Recorder([site], limit=1000)
    for _ in range(100):
        recorder.start_portion()
        recorder.add("a", call_of(100))
    kept = list(recorder.calls["a"])
    assert kept[0] == 0
    assert len(kept) * 100 <= 1000 + 100
    assert len(kept) > 5
    assert max(b - a for a, b in itertools.pairwise([*kept, 100])) < 3 * 100 / len(kept)


def test_the_sample_is_not_the_same_part_of_every_batch():
    """Portions come shortest first: of batches of two portions, every second one would be the short halves."""
    site = collab_heads.AttentionSite("a", "enc-self", 0, 1)
    recorder = Recorder([site], limit=2000)
    for _ in range(100):
        recorder.start_portion()
        recorder.add("a", call_of(100))
    long = sum(portion % 2 for portion in recorder.calls["a"])
    assert recorder.share < 1
    assert 0.3 < long / len(recorder.calls["a"]) < 0.7


def test_a_tensor_that_calls_share_counts_once():
    site = collab_heads.AttentionSite("a", "enc-self", 0, 1)
    recorder = Recorder([site], limit=250)
    for _ in range(3):
        recorder.start_portion()
        call = call_of(100)
        recorder.add("a", call)
        recorder.add("a", call)  # a module that serves two layers with one input
    assert list(recorder.calls["a"]) == [0, 1, 2]
    assert len(recorder.calls_of("a")) == 6


def test_one_portion_is_kept_whatever_its_size():
    recorder, found = run(FAMILIES["bert"].build(), FAMILIES["bert"].inputs(), limit=1, batches=5)
    assert all(recorder.calls_of(site.path) for site in found)
    assert recorder.share < 1


def test_a_class_written_in_a_notebook_is_recorded():
    """transformers' own setter looks for the source of a class, and leaves the backend if there is none."""
    written = type("Written", (BertModel,), {"__module__": "__nowhere__"})
    model = written(FAMILIES["bert"].build().config).eval()
    before = snapshot(model)
    recorder, found = run(model, FAMILIES["bert"].inputs())
    assert all(recorder.calls_of(site.path) for site in found)
    assert_unchanged(model, before)


@pytest.mark.parametrize("name", ("marian", "marian-decoder"))
def test_caches_are_refused(name):
    """The inputs of a call do not make the keys that a cache holds."""
    family = FAMILIES[name]
    model, inputs = family.build(), {"use_cache": True, **family.inputs()}
    cached = {**inputs, "past_key_values": model(**inputs).past_key_values, "attention_mask": None}
    with refused(model, CalibrationError, "layers.0.self_attn", "without past_key_values"):
        run(model, cached)
