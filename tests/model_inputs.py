"""Batches for the tiny models: padded texts, images, spectra and waves."""

import torch
from model_sizes import END, FRAMES, IMAGE, MEL, PATCH, SAMPLES, VOCABULARY, WIDTH


def batch(decoder: bool = False) -> dict[str, torch.Tensor]:
    """A padded batch of three sentences."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    mask[2, 7:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if decoder:
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (3, 6), generator=generator)
    return inputs


def cross_batch() -> dict[str, torch.Tensor]:
    """A batch for a lone decoder with cross-attention."""
    inputs = batch()
    states = torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[0, 4:] = 0
    # left padding, as decoders are batched
    return {
        "input_ids": inputs["input_ids"].flip(1),
        "attention_mask": inputs["attention_mask"].flip(1),
        "encoder_hidden_states": states,
        "encoder_attention_mask": mask,
    }


def lone_batch() -> dict[str, torch.Tensor]:
    """A batch for a lone decoder without cross-attention, padded before its sentences, but for their first token.

    So every token has one to attend to: eager softmaxes in float32 make NaN of a row of float64's lowest numbers.
    """
    inputs = {name: value.flip(1) for name, value in batch().items()}
    inputs["attention_mask"][:, 0] = 1
    return inputs


def image_batch(masked: bool = False) -> dict[str, torch.Tensor]:
    """Three images; with a mask over the class token, the distillation token and the patches."""
    generator = torch.Generator().manual_seed(1)
    inputs = {"pixel_values": torch.randn(3, 3, IMAGE, IMAGE, generator=generator)}
    if masked:
        inputs["attention_mask"] = torch.ones(3, 2 + (IMAGE // PATCH) ** 2, dtype=torch.long)
        inputs["attention_mask"][1, 6:] = 0
    return inputs


def clip_batch() -> dict[str, torch.Tensor]:
    """Three texts with their ends, and a token that is left out: a causal stack does not see padding after texts."""
    inputs = batch()
    inputs["input_ids"].clamp_(max=END - 1)
    inputs["input_ids"].scatter_(1, inputs["attention_mask"].sum(1, keepdim=True) - 1, END)
    inputs["attention_mask"][:, 2] = 0
    return inputs


def siglip_batch() -> dict[str, torch.Tensor]:
    """Three texts padded on the left: SigLIP reads the last position."""
    return {name: value.flip(1) for name, value in batch().items()}


def spectrum_batch() -> dict[str, torch.Tensor]:
    """Three spectra as Whisper takes them, and what its decoder reads."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(3, MEL, 2 * FRAMES, generator=generator)
    return {"input_features": features, "decoder_input_ids": batch(decoder=True)["decoder_input_ids"]}


def wave_batch() -> dict[str, torch.Tensor]:
    """Three waves of different lengths."""
    mask = torch.ones(3, SAMPLES, dtype=torch.long)
    mask[1, 20:] = 0
    mask[2, 37:] = 0
    values = torch.randn(3, SAMPLES, generator=torch.Generator().manual_seed(1))
    return {"input_values": values * mask, "attention_mask": mask}


def repadded(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same batch with other content in its padding."""
    changed, padded = dict(inputs), inputs["attention_mask"] == 0
    if "input_ids" in inputs:
        changed["input_ids"] = torch.where(padded, 7, inputs["input_ids"])
    if "encoder_attention_mask" in inputs:
        hidden = (inputs["encoder_attention_mask"] == 0)[..., None]
        changed["encoder_hidden_states"] = inputs["encoder_hidden_states"].masked_fill(hidden, 9.0)
    if "input_values" in inputs:
        changed["input_values"] = inputs["input_values"].masked_fill(padded, 9.0)
    if "pixel_values" in inputs and "input_ids" not in inputs:  # the mask is that of the texts where there are any
        patches = padded[:, -((IMAGE // PATCH) ** 2) :].view(-1, 1, IMAGE // PATCH, IMAGE // PATCH)
        pixels = patches.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)
        changed["pixel_values"] = inputs["pixel_values"].masked_fill(pixels, 9.0)
    return changed


def cast(inputs: dict, dtype: torch.dtype) -> dict:
    """Floating-point inputs in the dtype of the model."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
