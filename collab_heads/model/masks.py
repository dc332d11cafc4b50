"""Which tokens of a batch are no padding, for either stack of a model."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.registry import is_lone_decoder, known_adapter
from collab_heads.sites import AttentionSite

# role -> whose padding counts on the query side and on the key side
IMAGES = "vision"  # the one side of which no batch holds token ids
MASKS = {"enc-self": ("encoder", "encoder"), "dec-self": ("decoder", "decoder"), "dec-enc": ("decoder", "encoder")}


def sides(site: AttentionSite) -> tuple[str, str]:
    """Whose padding counts on the query side and on the key side of a site."""
    return MASKS[site.role] if site.stack is None else (site.stack, site.stack)


def reads_ids(site: AttentionSite) -> bool:
    """Whether the queries of a site are tokens, where the batches hold token ids at all."""
    return sides(site)[0] != IMAGES


def token_masks(model: PreTrainedModel, inputs: Mapping) -> dict[str, Tensor | None]:
    """Which tokens count, on the encoder side and on the decoder side: [B, T] bool, or None where all do.

    Models of audio have frames for tokens, those of images patches; one with two stacks has a mask for each, too.
    """
    masks, adapter = masks_of_tokens(model, inputs), known_adapter(model.config)
    return masks if adapter is None else adapter.token_masks(model.config, inputs, masks)


def output_mask(model: PreTrainedModel, inputs: Mapping) -> Tensor | None:
    """Which tokens count of what a model puts out, where it is of tokens: [B, T] bool, or None where all do."""
    masks = token_masks(model, inputs)
    return masks.get("output", masks["decoder"])  # of the only stack, where there is one


def masks_of_tokens(model: PreTrainedModel, inputs: Mapping) -> dict[str, Tensor | None]:
    """What attention masks and the decoder's inputs say."""
    config = model.config
    attention_mask = as_bool(inputs.get("attention_mask"))
    if not config.is_encoder_decoder:
        if is_lone_decoder(config):  # it cross-attends to what the caller passes in
            return {"encoder": as_bool(inputs.get("encoder_attention_mask")), "decoder": attention_mask}
        return {"encoder": attention_mask, "decoder": attention_mask}
    decoder_mask, ids = as_bool(inputs.get("decoder_attention_mask")), decoder_ids(model, inputs)
    if decoder_mask is None and ids is not None and config.pad_token_id is not None:
        decoder_mask = ids != config.pad_token_id
        decoder_mask[:, 0] = True  # the start token is often the padding token
    return {"encoder": attention_mask, "decoder": decoder_mask}


def decoder_ids(model: PreTrainedModel, inputs: Mapping) -> Tensor | None:
    """The tokens that the decoder of an encoder-decoder reads, [B, T], or None where the inputs hold embeddings.

    Without decoder inputs it reads the labels or, where they are no tokens (BART's and T5's classifiers), the source,
    shifted right: position t holds the token of t - 1. What position 0 says does not matter: it is the start token.
    """
    if inputs.get("decoder_input_ids") is not None or inputs.get("decoder_inputs_embeds") is not None:
        return inputs.get("decoder_input_ids")
    labels = inputs.get("labels")
    is_text = labels is not None and labels.ndim == 2 and not labels.is_floating_point()
    source = labels if is_text else inputs.get("input_ids")
    if source is None:
        return None
    shifted = torch.cat([source[:, :1], source[:, :-1]], dim=1)
    pad = model.config.pad_token_id
    return shifted.masked_fill(shifted == -100, 0 if pad is None else pad)


def as_bool(mask: Tensor | None) -> Tensor | None:
    """An attention mask as booleans of shape [B, T]; multiple-choice models flatten (B, choices, T) the same way."""
    return None if mask is None else mask.bool().flatten(0, -2)
