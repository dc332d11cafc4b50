"""Helpers of tests that trim: tiny models of a tokenizer, what they compute of texts, and the tokens of these."""

import torch
from transformers import BertConfig, BertModel

ROUNDING = 1e-6  # products of fewer rows may be summed in another order; hidden states are compared bit for bit
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}


def bert(tokenizer, cls=BertModel, **more):
    torch.manual_seed(0)
    return cls(BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SIZES, **more)).eval()


def tokens_of(tokenizer, texts):
    return [tokenizer.convert_ids_to_tokens(row) for row in tokenizer(texts)["input_ids"]]


@torch.no_grad()
def states(model, tokenizer, texts):
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])[0]
