"""What an exported model puts out, against PyTorch."""

import torch
from model_sizes import VOCABULARY

ENGINE_NOISE = 1e-5  # float32 in another engine, of the largest output; differences seen: 2e-6 and below


def text_batch(rows, length, left=False, seed=3):
    """Of another shape than the examples of an export, padded."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, slice(length // 2) if left else slice(-(length // 2), None)] = 0
    return {"input_ids": torch.randint(4, VOCABULARY, (rows, length), generator=generator), "attention_mask": mask}


@torch.no_grad()
def assert_same_outputs(model, served, batch):
    """Where no padding is, of outputs per token."""
    expected, found = (each(**batch)[0] for each in (model, served))
    if expected.ndim == 3:
        expected, found = (each[batch["attention_mask"].bool()] for each in (expected, found))
    torch.testing.assert_close(found, expected, rtol=0, atol=ENGINE_NOISE * float(expected.abs().max()))


def assert_same_tokens(model, served, batch):
    """Greedily and with beams, with a cache."""
    for beams in (1, 3):
        options = {"num_beams": beams, "do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
        assert torch.equal(served.generate(**batch, **options), model.generate(**batch, **options))
