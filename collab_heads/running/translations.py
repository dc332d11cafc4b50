"""Translate: what a model writes as text, or as text for a decoder to read where batches have none."""

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.base.progress import progress_bar
from collab_heads.errors import CalibrationError
from collab_heads.model.opened import input_device
from collab_heads.running.batches import (
    Batch,
    Part,
    check_modalities,
    evaluating,
    has_decoder_inputs,
    has_text_labels,
    moved,
    reads_texts_alone,
)

LENGTH, MORE = 2, 8  # a translation has at most LENGTH tokens per source token, plus MORE


def generate(model: PreTrainedModel, batch: Mapping, **settings: Any) -> Any:
    """Return what a model generates from a batch, with settings of its method `generate`."""
    return cast(Any, model).generate(**moved(batch, input_device(model)), **settings)  # a mixin, to type checkers


def translations(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batches: Iterable[Mapping], most: int, **settings: Any
) -> list[list[str]]:
    """Return one translation of each text of each batch, without sampling, in evaluation mode.

    Lengths and numbers of translations in the generation config of the model do not count.

    Args:
        model: translates; every module's mode is restored.
        tokenizer: of the target.
        batches: `input_ids` and `attention_mask`.
        most: tokens of a translation at most, the end token included.
        **settings: of `generate`, such as `num_beams`.
    """
    with evaluating(model):
        settings |= {"do_sample": False, "num_return_sequences": 1, "max_new_tokens": most, "max_length": None}
        written = (generate(model, batch, **settings) for batch in batches)
        return [tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in written]


def needs_translation(model: PreTrainedModel, batch: Batch) -> bool:
    """Return True if the decoder of a model would have no inputs."""
    reads = has_decoder_inputs(batch) or has_text_labels(batch)
    return model.config.is_encoder_decoder and model.can_generate() and not reads


def with_translations(original: PreTrainedModel, part: Part) -> Part:
    """Return batches with decoder inputs: where they are missing, the original's greedy translation.

    Raises:
        CalibrationError: if the original cannot translate a batch; its number is named.
    """
    found, missing = list(part), [place for place, (_, batch) in enumerate(part) if needs_translation(original, batch)]
    with evaluating(original):
        for place in progress_bar(missing, desc="translating", disable=not missing):
            number, batch = part[place]
            try:
                check_modalities(original, batch)
                found[place] = number, batch | translate(original, batch)
            except Exception as error:  # whatever the model raises about its inputs, with the batch named
                raise CalibrationError(f"{type(original).__name__} cannot translate batch {number}: {error}") from error
    return found


def most_tokens(original: PreTrainedModel, batch: Batch) -> int:
    """Return the most tokens that a translation may have.

    For texts that is twice the length of the source plus some more; for audio, as many as the decoder can write.
    """
    config = original.config
    room = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None) or math.inf
    if reads_texts_alone(original):
        longest = next(value for value in batch.values() if isinstance(value, Tensor) and value.ndim > 1).shape[1]
        room = min(1 + LENGTH * longest + MORE, room)
    return int(max(2, room))


def translate(original: PreTrainedModel, batch: Batch, num_beams: int = 1) -> Batch:
    """Return decoder inputs and their mask, [B, T]: the translation up to its last token before the end token."""
    config = copy.deepcopy(original.generation_config)
    config.max_length, config.max_new_tokens = most_tokens(original, batch), None
    config.num_beams, config.do_sample = num_beams, False
    config.return_dict_in_generate = True  # without, Whisper leaves out what its decoder reads first
    if getattr(config, "return_timestamps", False):
        setattr(config, "return_timestamps", False)  # noqa: B010 (Whisper has it)
    tokens = generate(original, batch, generation_config=config)["sequences"].cpu()
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
