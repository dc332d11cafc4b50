"""Texts that a language model writes itself, to calibrate with."""

import copy

import pytest
import torch
from model_configs import bert_config, gpt2_config, marian_config, rotary_config
from transformers import (
    BertForMaskedLM,
    BertModel,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MarianMTModel,
    RobertaConfig,
    RobertaForCausalLM,
)

from collab_heads import compress, generate_batches
from collab_heads.errors import ArgumentError, NonFiniteError, UnsupportedModelError
from collab_heads.running.generation import ROWS


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(rotary_config(LlamaConfig))


@pytest.mark.parametrize(
    "cls,config", ((LlamaForCausalLM, rotary_config(LlamaConfig)), (GPT2LMHeadModel, gpt2_config()))
)
def test_each_token_follows_from_those_before_it(cls, config):
    """Logits that are far apart leave one token: the one that a run of the whole text, without a cache, puts first."""
    torch.manual_seed(0)
    model = cls(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(1000)
    (batch,) = generate_batches(model, 5, 12, start=[3, 1])
    ids = batch["input_ids"]
    assert ids.shape == (5, 12) and list(batch) == ["input_ids"] and ids[:, :2].tolist() == [[3, 1]] * 5
    with torch.no_grad():
        expected = model.eval()(input_ids=ids, use_cache=False).logits.argmax(-1)
    assert torch.equal(ids[:, 3:], expected[:, 2:-1])
    assert len(ids[:, 2].unique()) > 1


def test_tokens_are_drawn_by_their_probability(llama):
    """The model puts out the same logits for all tokens, whatever it reads."""
    with torch.no_grad():
        llama.lm_head.weight.zero_()
    size = llama.config.vocab_size
    ids = torch.cat([batch["input_ids"] for batch in generate_batches(llama, ROWS + 6, 30)])
    assert ids.shape == (ROWS + 6, 30)
    counts = ids.flatten().bincount(minlength=size)
    expected = ids.numel() / size
    assert (counts - expected).abs().max() < 6 * expected**0.5  # six standard deviations


def test_the_seed_alone_decides(llama):
    state = torch.get_rng_state()
    llama.train()
    first, again, other = (generate_batches(llama, 3, 8, seed=seed)[0]["input_ids"] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state) and llama.training


def test_a_model_that_ends_its_texts_goes_on(llama):
    """The end token is one like the others: the next text follows in the same row."""
    llama.generation_config.eos_token_id = list(range(llama.config.vocab_size))
    assert generate_batches(llama, 2, 9)[0]["input_ids"].shape == (2, 9)


def test_own_texts_calibrate(llama):
    original = copy.deepcopy(llama)
    report = compress(llama, generate_batches(llama, 40, 16), 0.6, refine_steps=0)
    assert 0 < report.measured_error and llama.num_parameters() < original.num_parameters()
    assert generate_batches(llama, 2, 9)[0]["input_ids"].shape == (2, 9)


@pytest.mark.parametrize(
    "cls,config",
    (
        (BertModel, bert_config()),
        (BertForMaskedLM, bert_config()),
        (MarianMTModel, marian_config()),
        (LlamaModel, rotary_config(LlamaConfig)),
    ),
)
def test_other_models_are_refused(cls, config):
    with pytest.raises(UnsupportedModelError, match=f"{cls.__name__} writes no texts from nothing"):
        generate_batches(cls(config))


@pytest.mark.parametrize(
    "given,said",
    (
        ({"count": 0}, "count 0"),
        ({"length": 1}, "length 1"),
        ({"length": 4, "start": [1, 2, 3]}, "length 4"),
        ({"length": 10**6}, "length 1000000 is too large"),
        ({"start": [-1]}, "start: -1 is not the id"),
        ({"start": [10**6]}, "start: 1000000 is not the id"),
        ({"start": [True]}, "start"),
        ({"seed": -1}, "seed"),
    ),
)
def test_wrong_arguments(llama, given, said):
    with pytest.raises(ArgumentError, match=said):
        generate_batches(llama, **{"length": 9, **given})


def test_a_model_that_puts_out_nan_is_named(llama):
    with torch.no_grad():
        llama.lm_head.weight[3] = torch.inf
    with pytest.raises(NonFiniteError, match="LlamaForCausalLM puts out NaN or inf"):
        generate_batches(llama, 2, 9)


def test_no_text_is_longer_than_the_model_reads():
    """RoBERTa's positions begin after its padding token."""
    config = RobertaConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, is_decoder=True)
    config.max_position_embeddings, config.intermediate_size = 16, 16
    model = RobertaForCausalLM(config)
    assert generate_batches(model, 2, 14)[0]["input_ids"].shape == (2, 14)
    with pytest.raises(ArgumentError, match="length 15 is too large: 14 at most"):
        generate_batches(model, 2, 15)


def test_tokens_without_an_embedding_are_not_drawn(llama):
    llama.lm_head = torch.nn.Linear(llama.config.hidden_size, 3 * llama.config.vocab_size)
    (batch,) = generate_batches(llama, 20, 12)
    assert batch["input_ids"].max() < llama.config.vocab_size
