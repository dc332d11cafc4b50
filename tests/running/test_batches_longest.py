"""The longest text that a model and its tokenizer take."""

import pytest
import torch
from known_heads import word_pieces

from collab_heads.running.batches import longest_input
from families import FAMILIES


@pytest.mark.parametrize(
    "name, limit", (("bert", 64), ("roberta", 64 - 2), ("marian", 64), ("bart", 64), ("t5", None), ("distilbert", 64))
)
def test_the_longest_input(name, limit):
    """RoBERTa's positions start after its padding index; T5 has none; and the tokenizer may allow less."""
    model = FAMILIES[name].build()
    assert longest_input(model, word_pieces(model_max_length=int(1e30))) == limit
    assert longest_input(model, word_pieces(model_max_length=50)) == 50
    if limit:
        ids = torch.full((1, limit), 7)
        more = {"decoder_input_ids": ids[:, :1]} if model.config.is_encoder_decoder else {}
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **more)
        with pytest.raises((IndexError, RuntimeError)):
            long = torch.full((1, limit + 1), 7)
            model(input_ids=long, attention_mask=torch.ones_like(long), **more)
