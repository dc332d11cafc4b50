"""What a decoder reads where the batches do not say: the original's own translations."""

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from collab_heads.distillation.examples import Batch, has_decoder_inputs, has_text_labels, moved
from collab_heads.errors import CalibrationError
from collab_heads.model.backends import evaluating

LENGTH, MORE = 2, 8  # a translation has at most so many tokens per source token, and so many more


def needs_translation(model: PreTrainedModel, batch: Batch) -> bool:
    """Whether a decoder would have nothing to read."""
    reads = has_decoder_inputs(batch) or has_text_labels(batch)
    return model.config.is_encoder_decoder and model.can_generate() and not reads


def with_translations(original: PreTrainedModel, batches: Sequence[Batch], *, show: bool = True) -> list[Batch]:
    """Batches with decoder inputs: those without get what the original writes, greedily.

    Raises:
        CalibrationError: if the original cannot translate one; it is numbered.
    """
    missing = [index for index, batch in enumerate(batches) if needs_translation(original, batch)]
    found = list(batches)
    with evaluating(original):
        for index in tqdm(missing, desc="translating", leave=False, disable=not (show and missing)):
            try:
                found[index] = batches[index] | translate(original, batches[index])
            except Exception as error:  # whatever the model raises about its inputs, with the batch named
                raise CalibrationError(f"{type(original).__name__} cannot translate batch {index}: {error}") from error
    return found


def translate(original: PreTrainedModel, batch: Batch) -> Batch:
    """Decoder inputs and their mask, [B, T]: the translation up to its last token before the end."""
    config = copy.deepcopy(original.generation_config)
    longest = next(value for value in batch.values() if isinstance(value, Tensor) and value.ndim > 1).shape[1]
    room = getattr(original.config, "max_position_embeddings", None) or LENGTH * longest + MORE + 1
    config.max_length, config.max_new_tokens = None, max(1, min(LENGTH * longest + MORE, room - 1))
    config.num_beams, config.do_sample, config.return_dict_in_generate = 1, False, False
    generate = cast(Any, original).generate  # a mixin, to type checkers
    tokens = generate(**moved(batch, original.device), generation_config=config).cpu()
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ended = torch.zeros_like(tokens, dtype=torch.bool)
    for end in ends:
        ended |= tokens == end if end is not None else False
    ended[:, 0] = False  # the decoder may start with the token that ends
    used = ended.cumsum(1) == 0
    length = int(used.sum(1).max())
    pad = original.config.pad_token_id
    filled = tokens.masked_fill(~used, tokens[0, 0] if pad is None else pad)
    return {"decoder_input_ids": filled[:, :length], "decoder_attention_mask": used[:, :length].long()}
