"""Readers: the module that reads a site's output with the residual added, found in every family without its names."""

import pytest
import torch
from compressing import batches_of
from opening import layers_of
from unchanged import assert_unchanged, snapshot

from collab_heads.running.batches import run_batches
from collab_heads.running.residual_readers import find_readers, stream_weights, token_weights, watching
from families import FAMILIES, LAYOUTS

# Layers that share modules run them more than once; CLIP's image model has a norm for the first patch alone at its end.
ALBERT = "encoder.albert_layer_groups.0.albert_layers"
WITHOUT = {
    "albert-groups": {f"{ALBERT}.{layer}{end}" for layer in (0, 1) for end in ("", ".attention")},
    "albert": {f"{ALBERT}.0", f"{ALBERT}.0.attention"},
    "clip": {"vision_model.encoder.layers.1.mlp"},
    "clip-vision": {"encoder.layers.1.mlp"},
}
NORMS = {
    "dinov2": ["0.norm2", "1.norm1", "1.norm2", "layernorm"],
    "bert": ["attention.output.LayerNorm", "output.LayerNorm"] * 2,
    "gpt2": ["ln_2", "1.ln_1", "ln_2", "ln_f"],
    "opt": ["0.final_layer_norm", "1.self_attn_layer_norm", "1.final_layer_norm", "decoder.final_layer_norm"],
    "gemma3": ["post_attention_layernorm", "post_feedforward_layernorm"] * 2,
}


def readers_of(name):
    model = FAMILIES[name].build().eval()
    sites = layers_of(model).in_order
    return model, sites, find_readers(model, sites, batches_of(FAMILIES[name], 1)[0])


@pytest.mark.parametrize("name", [*LAYOUTS, "dinov2"])
def test_sites_have_readers(name):
    model, sites, readers = readers_of(name)
    assert {site.path for site in sites} - {reader.site.path for reader in readers} == WITHOUT.get(name, set())
    for reader in readers:
        assert model.get_submodule(reader.output) is reader.site.output


@pytest.mark.parametrize("name", NORMS)
def test_they_are_norms_in_the_order_in_which_they_run(name):
    _, _, readers = readers_of(name)
    for reader, end in zip(readers, NORMS[name], strict=True):
        assert reader.name.endswith(end)


def test_a_model_is_unchanged():
    model = FAMILIES["bert"].build()
    before = snapshot(model)
    find_readers(model, layers_of(model).in_order, batches_of(FAMILIES["bert"], 1)[0])
    assert_unchanged(model, before)


@pytest.mark.parametrize("change, scale", [(lambda states: 2 * states, 2.0), (lambda states: states.sin(), None)])
def test_what_is_read_is_the_output_times_a_scale_or_the_site_has_no_reader(change, scale):
    model = FAMILIES["bert"].build().eval()
    norm = model.base_model.encoder.layer[0].output.LayerNorm
    norm.register_forward_pre_hook(lambda _, args: (change(args[0]),))
    sites = layers_of(model).in_order
    readers = find_readers(model, sites, batches_of(FAMILIES["bert"], 1)[0])
    found = {reader.site.path: reader.scale for reader in readers}
    assert len(found) == (4 if scale else 3)
    for path, each in found.items():
        wanted = scale if path == "encoder.layer.0" else 1.0
        torch.testing.assert_close(each, torch.full_like(each, wanted), rtol=1e-4, atol=0)


def test_layers_that_scale_their_output():
    model = FAMILIES["dinov2"].build().eval()
    layer = model.base_model.get_submodule("encoder.layer.0")
    with torch.no_grad():
        layer.layer_scale1.lambda1.copy_(torch.linspace(0.1, 2, len(layer.layer_scale1.lambda1)))
    sites = layers_of(model).in_order
    readers = find_readers(model, sites, batches_of(FAMILIES["dinov2"], 1)[0])
    torch.testing.assert_close(readers[0].scale, layer.layer_scale1.lambda1.detach(), rtol=1e-3, atol=1e-4)


def test_what_is_watched_adds_up():
    """A norm after a block reads the sum of what went into the block and what came out of it."""
    model, _, readers = readers_of("bert")
    reader, seen, before = readers[1], [], []
    layer = model.base_model.encoder.layer[0]
    layer.intermediate.register_forward_pre_hook(lambda _, args: before.append(args[0]))
    masks = {}
    with watching(model, reader, lambda inputs, put_out, read: seen.append((inputs, put_out, read))):
        run_batches(model, batches_of(FAMILIES["bert"], 1), masks, "running")
    ((inputs, put_out, read),) = seen
    assert torch.equal(layer.output.dense(inputs), put_out)
    torch.testing.assert_close(read, put_out + before[0], rtol=0, atol=1e-6)
    assert len(reader.real(read, masks)) == int(batches_of(FAMILIES["bert"], 1)[0]["attention_mask"].sum())


def test_a_site_that_runs_twice_has_no_reader():
    """Even if both runs see the same: a refit would count its tokens twice, and not know which ones it sees."""

    def run_before(layer, args, kwargs):
        layer.forward(*args, **kwargs)

    model = FAMILIES["bert"].build().eval()
    model.base_model.encoder.layer[0].register_forward_pre_hook(run_before, with_kwargs=True)
    sites = layers_of(model).in_order
    readers = find_readers(model, sites, batches_of(FAMILIES["bert"], 1)[0])
    assert [reader.site.path for reader in readers] == ["encoder.layer.1.attention.self", "encoder.layer.1"]


def test_tokens_without_variance_count_as_flat_ones():
    states = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    states[3] = 0
    weights = token_weights(states)
    torch.testing.assert_close(weights[:3], 1 / states[:3].var(-1))
    assert weights.isfinite().all() and weights[3] <= 100 * weights.median() * (1 + 1e-6)
    assert token_weights(torch.zeros(2, 4)).isfinite().all()


def test_errors_count_by_the_variance_of_the_stream():
    model, sites, readers = readers_of("gpt2")
    batches = batches_of(FAMILIES["gpt2"], 2)
    weights, norm = stream_weights(model, sites, batches), model.base_model.h[0].ln_2
    assert weights.keys() == {reader.site.path for reader in readers}
    seen = []
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for batch in batches:
        with torch.no_grad():
            model(**batch)
    read = torch.cat([states[batch["attention_mask"].bool()] for states, batch in zip(seen, batches, strict=True)])
    assert weights[sites[0].path] == pytest.approx(float((1 / read.var(-1)).mean()) / read.shape[-1], rel=1e-3)


def test_what_is_scaled_before_it_is_added_counts_less():
    model, (first, *_), _ = readers_of("dinov2")
    batches = batches_of(FAMILIES["dinov2"], 1)
    whole = stream_weights(model, [first], batches)[first.path]
    with torch.no_grad():
        layer = model.base_model.get_submodule("encoder.layer.0")
        layer.layer_scale1.lambda1.mul_(0.1)
    assert stream_weights(model, [first], batches)[first.path] < 0.1 * whole
