"""Padding where inputs are not tokens, or two stacks read two things."""

import pytest
import torch
from model_configs import audio_config
from model_inputs import cast, repadded, spectrum_batch, wave_batch
from model_runs import output
from model_sizes import EXACT64, FRAMES, IMAGE, MEL, PATCH
from opening import layers_of
from transformers import Wav2Vec2Config, Wav2Vec2Model

from collab_heads import get_adapter
from collab_heads.calibration.calibrate import calibrate
from collab_heads.running.batches import output_mask, sides, token_masks
from families import FAMILIES, make

PATCHES = {"clip": 1 + (IMAGE // PATCH) ** 2, "siglip": (IMAGE // PATCH) ** 2}


def moments(model, inputs):
    """path -> what calibration sums up of the inputs of its queries and keys."""
    sites = layers_of(model).with_heads
    return calibrate(model, sites, (), sites, [cast(inputs, torch.float64)])


@pytest.mark.parametrize("name", PATCHES)
def test_each_stack_has_its_own_padding(name):
    """Texts count without their padding, images whole; other padding changes nothing of what is summed up."""
    model, inputs = FAMILIES[name].build().double(), FAMILIES[name].inputs()
    found, other = moments(model, inputs), moments(model, repadded(inputs))
    counts = {"text": int(inputs["attention_mask"].sum()), "vision": 3 * PATCHES[name]}
    for site in get_adapter(model).sites(model):
        assert sides(site) == (site.stack, site.stack)
        seen, again = found.query_key[site.path], other.query_key[site.path]
        assert {seen.query.count, seen.key.count, found.outputs[site.path].count} == {counts[site.stack]}
        torch.testing.assert_close(seen.query.outer, again.query.outer, rtol=EXACT64, atol=EXACT64)


def test_frames_of_padding_do_not_count():
    """Frames whose samples are all there, counted by hand; they are those that the model lets attend."""
    model, inputs = FAMILIES["wav2vec2"].build().double(), wave_batch()
    config = model.config
    length = inputs["input_values"].shape[1]
    expected = torch.zeros(3, frames_by_hand(config, length), dtype=torch.bool)
    for row, samples in enumerate(inputs["attention_mask"].sum(1).tolist()):
        expected[row, : frames_by_hand(config, samples)] = True
    mask = token_masks(model, inputs)["encoder"]
    assert torch.equal(mask, expected)
    assert torch.equal(mask, model._get_feature_vector_attention_mask(mask.shape[1], inputs["attention_mask"]))
    found = moments(model, inputs)
    assert {each.query.count for each in found.query_key.values()} == {int(mask.sum())}
    assert output(model, inputs).shape[:2] == output_mask(model, inputs).shape


def frames_by_hand(config, samples):
    """How many windows of every convolution fit into what the one before has made."""
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        samples = sum(1 for start in range(0, samples, stride) if start + kernel <= samples)
    return samples


def test_what_comes_after_the_encoder_has_frames_of_its_own():
    config = audio_config(Wav2Vec2Config)
    config.add_adapter, config.num_adapter_layers, config.adapter_stride = True, 2, 2
    model, inputs = make(Wav2Vec2Model, config).double(), wave_batch()
    mask = output_mask(model, inputs)
    assert mask.shape == output(model, inputs).shape[:2] != token_masks(model, inputs)["encoder"].shape
    assert torch.equal(mask, model._get_feature_vector_attention_mask(mask.shape[1], inputs["attention_mask"]))


def test_silence_counts_for_whisper():
    """It attends to all of its 30 seconds: the mask of the samples has no effect."""
    model, inputs = FAMILIES["whisper"].build(), spectrum_batch()
    masked = inputs | {"attention_mask": torch.ones(3, 2 * FRAMES, dtype=torch.long)}
    masked["attention_mask"][:, FRAMES:] = 0
    assert token_masks(model, masked)["encoder"] is None
    assert masked["input_features"].shape == (3, MEL, 2 * FRAMES)
    assert torch.equal(output(model, masked), output(model, inputs))
    assert token_masks(model, masked)["decoder"].shape == inputs["decoder_input_ids"].shape
