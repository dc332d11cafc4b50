"""What tests of compression share: more than one batch, and a site to look at."""

import torch

import collab_heads
from collab_heads.model.open_site import open_sites
from families import VOCABULARY


def batches_of(family, count=3, seed=0):
    """Batches as `family.inputs()` gives them, with other tokens or pixels."""
    found, generator = [], torch.Generator().manual_seed(seed)
    for _ in range(count):
        inputs = family.inputs()
        for name in ("input_ids", "decoder_input_ids"):
            if name in inputs:
                inputs[name] = torch.randint(3, VOCABULARY, inputs[name].shape, generator=generator)
        if "pixel_values" in inputs:
            inputs["pixel_values"] = torch.randn(inputs["pixel_values"].shape, generator=generator)
        found.append(inputs)
    return found


def first_site(model):
    return open_sites(model, collab_heads.get_adapter(model))[0]
