"""Static caches that are made before the first token: exported programs, and prompts in chunks."""

import pytest
import torch
from changed_heads import change_heads
from model_sizes import FP32_NOISE, VOCABULARY
from test_export import CHANGES as EXPORTED
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import EncoderDecoderCache
from transformers.integrations.executorch import Seq2SeqLMExportableModule, TorchExportableModuleForDecoderOnlyLM

import collab_heads
from families import FAMILIES

LENGTH, CACHED = 6, 16  # tokens that are read one by one, and that there is room for


def of_type(model):
    return model.config.model_type.removesuffix("_text")


CHANGES = EXPORTED | {
    "stock": lambda model: None,
    "compressed": lambda model: collab_heads.compress(model, [FAMILIES[of_type(model)].inputs()], budget=0.6),
    "pruned": lambda model: collab_heads.prune_heads(model, heads={"dec-self": [[0, 1], [3]]}),
    "pruned, both layers empty": lambda model: collab_heads.prune_heads(model, heads={"dec-self": [[0, 1, 2, 3]] * 2}),
    "gated, removed": lambda model: change_heads(model, "both"),
}
ROTARY = ("qwen3", "llama", "gemma3", "mistral")
DECODERS, PAIRS = ("gpt2", *ROTARY), ("marian", "t5", "bart")


def built(name, change):
    model = FAMILIES[name].build().eval()
    CHANGES[change](model)
    model.config.use_cache = model.generation_config.use_cache = True
    model.generation_config.cache_implementation = "static"
    return model


def tokens(batch=1):
    return torch.randint(3, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(0))


def cases(names):
    """Family and change, but for kinds that the family does not have."""
    for name in names:
        for change in CHANGES:
            if name in ROTARY or not change.startswith("rotary"):
                yield pytest.param(name, change, marks=pytest.mark.slow)


def made_early(model, batch):
    """A cache as the exporters make it."""
    from transformers.configuration_utils import get_head_shapes

    config = model.config.get_text_config(decoder=True)
    cache = StaticCache(config=config, max_cache_len=CACHED)
    cache.early_initialization(batch, *get_head_shapes(config), model.dtype, model.device)
    return cache


SHAPED = [("gpt2", "shared"), ("qwen3", "compressed"), ("t5", "per_head+values"), ("marian", "everything")]
SHAPED += [("qwen3", "rotary, unequal groups"), ("qwen3", "pruned"), ("qwen3", "pruned, both layers empty")]
SHAPED += [("bert-decoder", "gated, removed"), ("t5", "pruned")]


@torch.no_grad()
@pytest.mark.parametrize(("name", "change"), SHAPED)
def test_shapes_are_those_that_the_first_token_would_make(name, change):
    model, inputs = built(name, change), FAMILIES[name].inputs()
    config = model.config.get_text_config(decoder=True)
    lazy = StaticCache(config=config, max_cache_len=CACHED)
    cache = EncoderDecoderCache(lazy, DynamicCache())
    model(**inputs, past_key_values=cache if "encoder_hidden_states" in inputs or config.is_encoder_decoder else lazy)
    early = made_early(model, len(inputs["input_ids"]))
    shapes = [[(layer.keys.shape, layer.values.shape) for layer in each.layers] for each in (early, lazy)]
    assert shapes[0] == shapes[1]


def test_stock_caches_are_stock():
    cache = made_early(built("gpt2", "stock"), 2)
    assert {tuple(layer.values.shape) for layer in cache.layers} == {(2, 4, CACHED, 8)}


@torch.no_grad()
@pytest.mark.parametrize(("name", "change"), list(cases(DECODERS)))
def test_exported_decoder(name, change):
    model, ids = built(name, change), tokens()
    exportable = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=CACHED)
    program = exportable.export(input_ids=ids[:, :1], cache_position=torch.tensor([0])).module()
    steps = [program(input_ids=ids[:, at : at + 1], cache_position=torch.tensor([at])) for at in range(LENGTH)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(ids).logits, rtol=0, atol=FP32_NOISE)


@torch.no_grad()
@pytest.mark.parametrize(("name", "change"), list(cases(PAIRS)))
def test_exported_encoder_decoder(name, change):
    model, ids, source = built(name, change), tokens(), tokens().flip(1)
    exported = Seq2SeqLMExportableModule(model, max_cache_length=CACHED, max_hidden_seq_length=64).export()
    encoded = exported.exported_encoder.module()(source)
    decoder = exported.exported_decoder.module()
    steps = [decoder(ids[:, at : at + 1], encoded, torch.tensor([at])) for at in range(LENGTH)]
    # without what models do after their last projection, as the exporter
    expected = model.lm_head(model.get_decoder()(input_ids=ids, encoder_hidden_states=encoded)[0])
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=0, atol=FP32_NOISE)


@pytest.mark.parametrize(("name", "change"), [("gpt2", "shared"), ("qwen3", "rotary, shared keys")])
def test_a_prompt_in_chunks(name, change):
    """`generate` then makes the cache early, too."""
    model, ids = built(name, change), tokens(2)
    whole, chunked = (model.generate(ids, max_new_tokens=4, prefill_chunk_size=size) for size in (None, 4))
    assert torch.equal(whole, chunked)
