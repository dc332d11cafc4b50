"""trim_vocabulary beside other models: those that share a config, tables or weights keep all tokens."""

import copy

import pytest
import torch
from model_runs import aligned
from slow_cases import slow
from tokenizers_made import FEW, fast
from torch import nn
from transformers import (
    BertLMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)
from trimming import bert, states
from unchanged import assert_unchanged, snapshot

from collab_heads import trim_vocabulary


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
    small, _ = trim_vocabulary(model, tokenizer, FEW)
    assert_unchanged(other, before)
    assert other.config.vocab_size == len(tokenizer) == other.get_input_embeddings().num_embeddings
    assert other.generation_config.to_dict() == generation
    assert torch.equal(states(other, tokenizer, FEW), expected)
    trim_vocabulary(alone, tokenizer, FEW)  # what it would be without another model
    assert model.config.to_dict() == alone.config.to_dict()
    assert model.generation_config.to_dict() == alone.generation_config.to_dict()
    assert model.state_dict().keys() == alone.state_dict().keys()
    assert torch.equal(states(model, small, FEW), states(alone, small, FEW))
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == (
        alone.get_input_embeddings().weight is alone.get_output_embeddings().weight
    )
    other.save_pretrained(tmp_path / "other")  # the other one is loaded and trimmed, too
    loaded = aligned(BertLMHeadModel.from_pretrained(tmp_path / "other"))
    assert torch.equal(states(loaded, tokenizer, FEW), expected)
    made, _ = trim_vocabulary(other, tokenizer, FEW[:5])
    assert other.config.vocab_size == len(made) < model.config.vocab_size == len(small)
    trim_vocabulary(alike, tokenizer, FEW[:5])
    assert torch.equal(states(other, made, FEW), states(alike, made, FEW))


def test_one_table_under_several_names_of_both_models():
    tokenizer = fast("Unigram")
    model, other = t5(tokenizer), t5(tokenizer)
    model.set_input_embeddings(model.shared)
    other.set_input_embeddings(model.get_input_embeddings())
    before = snapshot(other)
    _, report = trim_vocabulary(model, tokenizer, FEW)
    assert_unchanged(other, before)
    assert model.encoder.embed_tokens is model.decoder.embed_tokens is model.shared is not other.shared
    assert model.shared.weight is model.lm_head.weight and len(model.shared.weight) == report.tokens_after


def test_hooks_of_a_shared_table_are_those_of_both():
    tokenizer = fast("WordPiece")
    model, other = pair(tokenizer)
    one_module(model, other)
    seen = []
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(module))
    made, _ = trim_vocabulary(model, tokenizer, FEW)
    states(model, made, FEW), states(other, tokenizer, FEW)
    assert seen == [model.get_input_embeddings(), other.get_input_embeddings()] and seen[0] is not seen[1]


def test_modules_around_tables_stay_for_whoever_holds_them():
    tokenizer = fast("Unigram")
    model = t5(tokenizer)
    around = {name: id(module) for name, module in model.named_modules() if not isinstance(module, nn.Embedding)}
    del around["lm_head"]
    encoder = model.get_encoder()
    expected = states(encoder, tokenizer, FEW)
    made, _ = trim_vocabulary(model, tokenizer, FEW)
    assert around.items() <= {name: id(module) for name, module in model.named_modules()}.items()
    assert torch.equal(states(encoder, made, FEW), expected)


def test_shared_tables_that_accelerate_hooked_are_those_of_both():
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    tokenizer = fast("WordPiece")
    model, other = pair(tokenizer)
    one_module(model, other)
    expected, alone = states(other, tokenizer, FEW), copy.deepcopy(model)
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    made, _ = trim_vocabulary(model, tokenizer, FEW)
    trim_vocabulary(alone, tokenizer, FEW)
    assert torch.equal(states(other, tokenizer, FEW), expected)
    assert torch.equal(states(model, made, FEW), states(alone, made, FEW))


def test_a_wrapped_model_is_trimmed_in_its_wrapper():
    tokenizer = fast("WordPiece")
    around = nn.Sequential(bert(tokenizer))  # as sentence-transformers has it
    made, _ = trim_vocabulary(around[0], tokenizer, FEW)
    assert around[0].config.vocab_size == len(made)
