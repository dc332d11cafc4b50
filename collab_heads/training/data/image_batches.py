"""Batches of images, and what training does to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from datasets import Dataset
from torch import Tensor
from transformers import BaseImageProcessor

from collab_heads.training.data.classification import Labels
from collab_heads.training.data.glue import Data
from collab_heads.training.data.images import FILE, read_image

PIXELS, AXIS = "pixel_values", -1  # [B, channels, height, width]: the axis that a mirror turns round


def encode_images(data: Data, labels: Labels) -> dict[str, Dataset]:
    """Name the files of every split, with labels as the model numbers them; images are read batch by batch."""
    return {
        split: Dataset.from_dict(
            {FILE: columns[FILE], "labels": [int(labels.to_model(label)) for label in columns["label"]]}
        )
        for split, columns in data.splits.items()
    }


@dataclass(frozen=True)
class CollateImages:
    """Reads the images of a batch.

    Attributes:
        processor: makes them what the model takes: their size, their range.
    """

    processor: BaseImageProcessor

    def __call__(self, examples: Sequence[Mapping]) -> dict[str, Tensor]:
        """[B, channels, height, width] pixels, and [B] labels where the examples have them."""
        images = [read_image(example[FILE]) for example in examples]
        batch = {PIXELS: self.processor(images=images, return_tensors="pt")[PIXELS]}
        if "labels" in examples[0]:
            batch["labels"] = torch.tensor([example["labels"] for example in examples])
        return batch


@dataclass(frozen=True)
class Mirrored:
    """The model's own loss, on images of which some are mirrored, left and right.

    Drawn where dropout is, in the process that trains: a resumed run mirrors what an unbroken one does.

    Attributes:
        probability: that an image is.
    """

    probability: float

    def __call__(self, model: torch.nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean loss of a batch."""
        pixels = batch[PIXELS]
        chosen = (torch.rand(len(pixels)) < self.probability).to(pixels.device)  # (B)
        mirrored = torch.where(chosen[:, None, None, None], pixels.flip(AXIS), pixels)
        return model(**{**batch, PIXELS: mirrored}).loss
