"""What is compared of models that read texts and images at once, and of frames of audio."""

import pytest
import torch
from distilling import changed_pair
from model_inputs import cast, repadded
from model_sizes import EXACT64, LAYERS

from collab_heads import distill
from collab_heads.distillation.gap import read_parts
from families import FAMILIES


@torch.no_grad()
def parts_of(model, inputs):
    inputs = cast(inputs, model.dtype)
    return read_parts(model, inputs, model(**inputs, output_hidden_states=True))


@pytest.mark.parametrize("name", ("clip", "siglip"))
def test_layers_of_both_stacks_and_the_embeddings(name):
    """Rows are those of tokens without their padding, and of all patches; what stands in the padding changes none."""
    model, inputs = FAMILIES[name].build().double(), FAMILIES[name].inputs()
    found = parts_of(model, inputs)
    patches = model.vision_model.embeddings.num_positions
    rows = [int(inputs["attention_mask"].sum())] * LAYERS + [3 * patches] * LAYERS
    assert [len(part.rows) for part in found] == [*rows, 6]
    for part, again in zip(found, parts_of(model, repadded(inputs)), strict=True):
        torch.testing.assert_close(part.rows, again.rows, rtol=0, atol=EXACT64)
    with torch.no_grad():
        outputs = model(**cast(inputs, torch.float64))
    expected = torch.cat([outputs.text_embeds, outputs.image_embeds]).float()
    assert torch.equal(found[-1].rows, expected)


@pytest.mark.parametrize("name", ("clip", "siglip", "wav2vec2"))
def test_they_learn(name):
    model, original = changed_pair(name)
    report = distill(model, original, [FAMILIES[name].inputs()], steps=20, learning_rate=0.01)
    assert report.after.hidden < report.before.hidden


def test_frames_without_their_padding():
    model, inputs = FAMILIES["wav2vec2"].build().double(), FAMILIES["wav2vec2"].inputs()
    frames = int(model._get_feat_extract_output_lengths(inputs["attention_mask"].sum(1)).sum())
    assert [len(part.rows) for part in parts_of(model, inputs)] == [frames] * (LAYERS + 1)
