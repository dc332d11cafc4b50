"""Marian in CTranslate2, where the decoder starts from the embedding of the padding.

CTranslate2 starts Marian's decoder from zeros, and leaves the padding out. That is right for models of the Marian
toolkit, whose padding transformers adds as zeros, and silently wrong for those that transformers trained.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import PreTrainedModel

NEVER = -1e9  # added to the logit of the padding, which would not be left out


def starts_from_zeros(model: PreTrainedModel) -> bool:
    """Return True if the first token of a decoder has an embedding of zeros."""
    embeddings, start = cast(Any, model).get_decoder().get_input_embeddings(), model.config.decoder_start_token_id
    return not bool(embeddings.weight[start].any())


@contextmanager
def starting_right(model: PreTrainedModel) -> Iterator[None]:
    """Have Marian's decoder start from the embedding of its first token while a converter runs; others are unchanged.

    Args:
        model: what is converted; where the padding stays, its logit becomes very small, in place.
    """
    if model.config.model_type != "marian" or starts_from_zeros(model):
        yield
        return
    from ctranslate2.converters.transformers import _MODEL_LOADERS, BartLoader, MarianMTLoader

    class StartingFromPadding(MarianMTLoader):
        def set_decoder(self, spec, decoder):
            BartLoader.set_decoder(self, spec, decoder)

        def _remove_pad_weights(self, spec):
            pass

        def get_vocabulary(self, model, tokenizer):
            return BartLoader.get_vocabulary(self, model, tokenizer)

        def set_config(self, config, model, tokenizer):
            super().set_config(config, model, tokenizer)
            config.decoder_start_token = self.get_vocabulary(model, tokenizer)[model.config.decoder_start_token_id]

    name, before = type(model.config).__name__, _MODEL_LOADERS[type(model.config).__name__]
    with torch.no_grad():
        cast(Any, model).final_logits_bias[:, model.config.pad_token_id] = NEVER
    _MODEL_LOADERS[name] = StartingFromPadding()
    try:
        yield
    finally:
        _MODEL_LOADERS[name] = before
