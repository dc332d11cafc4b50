"""What tests of compression share: more than one batch, and a site to look at."""

import torch
from model_sizes import END, VOCABULARY
from opening import layers_of

ATTENTION = ("heads", "query_key", "values")  # parts


def batches_of(family, count=3, seed=0):
    """Batches as `family.inputs()` gives them, with other tokens, pixels or sounds; CLIP's texts keep their ends."""
    found, generator = [], torch.Generator().manual_seed(seed)
    for _ in range(count):
        inputs = family.inputs()
        for name in ("input_ids", "decoder_input_ids"):
            if name in inputs:
                ids = torch.randint(3, VOCABULARY, inputs[name].shape, generator=generator)
                inputs[name] = torch.where(inputs[name] == END, END, ids) if family.name.startswith("clip") else ids
        for name in ("pixel_values", "input_features", "input_values"):
            if name in inputs:
                inputs[name] = torch.randn(inputs[name].shape, generator=generator)
        found.append(inputs)
    return found


def first_site(model):
    return layers_of(model).with_heads[0]


def first_block(model):
    """The first feed-forward block."""
    return layers_of(model).feed_forwards[0]
