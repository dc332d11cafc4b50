"""Batches of images, and images that are mirrored in training."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import ViTImageProcessorPil

from collab_heads.data.images import CollateImages, Mirrored


@pytest.fixture
def collate():
    """To 8 x 4 pixels from -1 to 1."""
    half = [0.5] * 3
    return CollateImages(ViTImageProcessorPil(size={"height": 8, "width": 4}, image_mean=half, image_std=half))


def test_images_of_all_sizes_become_one(collate, tmp_path):
    for number, (size, colour) in enumerate((((3, 5), "black"), ((20, 9), "white"))):
        Image.new("RGB", size, colour).save(tmp_path / f"{number}.png")
    examples = [{"file": str(tmp_path / f"{number}.png"), "labels": number} for number in (0, 1)]
    batch = collate(examples)
    assert batch["pixel_values"].shape == (2, 3, 8, 4)
    assert batch["pixel_values"].dtype == torch.float32
    assert [batch["pixel_values"][i].unique().tolist() for i in (0, 1)] == [[-1.0], [1.0]]
    assert batch["labels"].tolist() == [0, 1]
    assert list(collate([{"file": examples[0]["file"]}])) == ["pixel_values"]


class Seen(torch.nn.Module):
    """Keeps what it is given."""

    def forward(self, pixel_values, labels):
        self.pixels, self.labels = pixel_values, labels
        return SimpleNamespace(loss=pixel_values.mean())


def test_some_images_are_mirrored_left_and_right():
    batch = {"pixel_values": torch.rand(200, 3, 2, 4), "labels": torch.arange(200)}
    original, model = batch["pixel_values"].clone(), Seen()
    torch.manual_seed(0)
    Mirrored(0.25)(model, batch)
    turned = torch.tensor([torch.equal(*pair) for pair in zip(model.pixels, original.flip(-1), strict=True)])
    kept = torch.tensor([torch.equal(*pair) for pair in zip(model.pixels, original, strict=True)])
    assert (turned ^ kept).all()
    assert 30 < turned.sum() < 70
    assert torch.equal(model.labels, batch["labels"])
    assert torch.equal(batch["pixel_values"], original)
    Mirrored(1.0)(model, batch)
    assert torch.equal(model.pixels, original.flip(-1))
