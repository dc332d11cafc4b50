"""trim_vocabulary beside other models: those that share a config, tables or weights stay whole, others are refused."""

import copy
import gc
import weakref

import pytest
import torch
from model_runs import aligned
from slow_cases import slow
from tokenizers_made import FEW, fast
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    M2M100Config,
    M2M100Model,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)
from trimming import SIZES, bert, states
from unchanged import assert_unchanged, refused, snapshot

from collab_heads import trim_vocabulary
from collab_heads.errors import SwapError
from collab_heads.vocabulary.other_models import holders


def t5(tokenizer):
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    ids = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), **sizes, **ids)).eval()


def one_config(model, other):
    other.config = model.config


def one_generation_config(model, other):
    model.generation_config.eos_token_id = other.config.vocab_size - 1
    other.generation_config = model.generation_config


def one_module(model, other):
    other.set_input_embeddings(model.get_input_embeddings())


def one_parameter(model, other):
    other.get_input_embeddings().weight = model.get_input_embeddings().weight


def one_output_layer(model, other):
    other.set_output_embeddings(model.get_output_embeddings())


def everything(model, other):
    for share in (one_config, one_generation_config, one_module, one_output_layer):
        share(model, other)


def pair(tokenizer):
    """Two language models of one vocabulary, with other weights."""
    first, second = (bert(tokenizer, BertLMHeadModel, is_decoder=True) for _ in range(2))
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(1.5)
        first.cls.predictions.bias.normal_()
    return first, second


SHARED = (one_config, one_generation_config, one_module, one_parameter, one_output_layer, everything)


@pytest.mark.parametrize("share", (everything, *slow(*SHARED[:-1])), ids=lambda share: share.__name__)
def test_another_model_stays_as_it_is(share, tmp_path):
    tokenizer = fast("WordPiece")
    model, other = pair(tokenizer)
    share(model, other)
    alone, alike = copy.deepcopy(model), copy.deepcopy(other)
    expected, before = states(other, tokenizer, FEW), snapshot(other)
    generation = other.generation_config.to_dict()
    report = trim_vocabulary(model, tokenizer, FEW)
    assert_unchanged(other, before)
    assert other.config.vocab_size == len(tokenizer) == other.get_input_embeddings().num_embeddings
    assert other.generation_config.to_dict() == generation
    assert torch.equal(states(other, tokenizer, FEW), expected)
    trim_vocabulary(alone, tokenizer, FEW)  # what it would be without another model
    assert model.config.to_dict() == alone.config.to_dict()
    assert model.generation_config.to_dict() == alone.generation_config.to_dict()
    assert model.state_dict().keys() == alone.state_dict().keys()
    assert torch.equal(states(model, report.tokenizer, FEW), states(alone, report.tokenizer, FEW))
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == (
        alone.get_input_embeddings().weight is alone.get_output_embeddings().weight
    )
    other.save_pretrained(tmp_path / "other")  # the other one is loaded and trimmed, too
    loaded = aligned(BertLMHeadModel.from_pretrained(tmp_path / "other"))
    assert torch.equal(states(loaded, tokenizer, FEW), expected)
    made = trim_vocabulary(other, tokenizer, FEW[:5]).tokenizer
    assert other.config.vocab_size == len(made) < model.config.vocab_size == len(report.tokenizer)
    trim_vocabulary(alike, tokenizer, FEW[:5])
    assert torch.equal(states(other, made, FEW), states(alike, made, FEW))


def test_one_table_under_several_names_of_both_models():
    tokenizer = fast("Unigram")
    model, other = t5(tokenizer), t5(tokenizer)
    model.set_input_embeddings(model.shared)
    other.set_input_embeddings(model.get_input_embeddings())
    before = snapshot(other)
    report = trim_vocabulary(model, tokenizer, FEW)
    assert_unchanged(other, before)
    assert model.encoder.embed_tokens is model.decoder.embed_tokens is model.shared is not other.shared
    assert model.shared.weight is model.lm_head.weight and len(model.shared.weight) == report.tokens_after


def test_hooks_of_a_shared_table_are_those_of_both():
    tokenizer = fast("WordPiece")
    model, other = pair(tokenizer)
    one_module(model, other)
    seen = []
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(module))
    made = trim_vocabulary(model, tokenizer, FEW).tokenizer
    states(model, made, FEW), states(other, tokenizer, FEW)
    assert seen == [model.get_input_embeddings(), other.get_input_embeddings()] and seen[0] is not seen[1]


def test_without_another_model_its_modules_stay():
    tokenizer = fast("WordPiece")
    model = bert(tokenizer, BertLMHeadModel)
    modules = {name: id(module) for name, module in model.named_modules()}
    trim_vocabulary(model, tokenizer, FEW)
    assert {name: id(module) for name, module in model.named_modules()} == modules


def test_shared_modules_around_tables_are_refused():
    tokenizer = fast("WordPiece")
    model, other = bert(tokenizer), bert(tokenizer, BertForSequenceClassification)
    other.bert.embeddings = model.embeddings
    before = snapshot(other)
    with refused(model, SwapError, "embeddings of this BertModel is in a BertModel of another model", "deepcopy"):
        trim_vocabulary(model, tokenizer, FEW)
    assert_unchanged(other, before)
    other.bert.embeddings = copy.deepcopy(model.embeddings)
    trim_vocabulary(model, tokenizer, FEW)


def test_shared_biases_and_stacks_are_refused():
    tokenizer = fast("WordPiece")
    model, other = pair(tokenizer)
    other.cls.predictions = model.cls.predictions
    with refused(model, SwapError, "cls.predictions of this BertLMHeadModel is in a BertOnlyMLMHead of another model"):
        trim_vocabulary(model, tokenizer, FEW)
    tokenizer = fast("Unigram")
    model = t5(tokenizer)
    encoder = T5EncoderModel(model.config)
    encoder.encoder = model.encoder
    with refused(model, SwapError, "encoder of this T5ForConditionalGeneration is in a T5EncoderModel"):
        trim_vocabulary(model, tokenizer, FEW)


def test_shared_positions_that_hold_the_padding_are_refused():
    tokenizer = fast("WordPiece")
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    model, other = (M2M100Model(M2M100Config(vocab_size=len(tokenizer), **sizes, **heads)) for _ in range(2))
    other.encoder.embed_positions = model.encoder.embed_positions
    with refused(model, SwapError, "encoder.embed_positions of this M2M100Model is in a M2M100Encoder of another"):
        trim_vocabulary(model, tokenizer, FEW)


def test_tables_that_accelerate_hooked_are_refused_where_they_are_shared():
    tokenizer = fast("WordPiece")
    model, other = pair(tokenizer)
    table = model.get_input_embeddings()
    table.forward = table.forward  # what its hooks do: bound to this module
    alone = copy.deepcopy(model)
    one_module(model, other)
    with refused(model, SwapError, "bert.embeddings.word_embeddings of this BertLMHeadModel is in a BertEmbeddings"):
        trim_vocabulary(model, tokenizer, FEW)
    trim_vocabulary(alone, tokenizer, FEW)


def test_a_part_of_a_model_is_refused_and_a_wrapped_one_is_not():
    tokenizer = fast("WordPiece")
    whole = bert(tokenizer, BertForSequenceClassification)
    with refused(whole, SwapError, "this BertModel is part of a BertForSequenceClassification", "the whole model"):
        trim_vocabulary(whole.bert, tokenizer, FEW)
    around = nn.Sequential(bert(tokenizer))  # as sentence-transformers has it
    made = trim_vocabulary(around[0], tokenizer, FEW).tokenizer
    assert around[0].config.vocab_size == len(made)


def test_models_that_are_gone_do_not_count():
    tokenizer = fast("WordPiece")
    model = BertModel(BertConfig(vocab_size=len(tokenizer), **SIZES))
    gone = BertForSequenceClassification(model.config)
    gone.bert = model
    gone.dropout.whole = [gone]  # a cycle: it is gone when garbage is collected
    seen = weakref.ref(gone)
    gc.disable()
    try:
        del gone
        assert seen() is not None and holders(model, {model})
        trim_vocabulary(model, tokenizer, FEW)
    finally:
        gc.enable()
    assert seen() is None
