"""A served model refuses what its graph does not take, unless it changes nothing."""

import re

import pytest
import torch
from model_sizes import VOCABULARY

from collab_heads import export, load_exported
from collab_heads.errors import ArgumentError
from collab_heads.layers.attention import CACHE
from families import FAMILIES

pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")

ENGINE_NOISE = 1e-5  # float32 in another engine; differences seen: 1e-6 and below
OUTPUT_FLAGS = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}


def ids(rows=2, length=6):
    return torch.randint(4, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def assert_refused(call, inputs, others):
    for name, value in others.items():
        with pytest.raises(
            ArgumentError, match=rf"the graph takes no {re.escape(name)}, but .*: leave it out, or export"
        ):
            call(**inputs, **{name: value})


@torch.no_grad()
def assert_same(model, served, inputs, others):
    """As the original computes it with them."""
    expected = model(**inputs, **others)[0]
    torch.testing.assert_close(served(**inputs, **others)[0], expected, rtol=0, atol=ENGINE_NOISE)


NOT_TAKEN = {
    **{"position_ids": ids(), "inputs_embeds": torch.ones(2, 6, 32)},
    **{"return_dict": False, "output_attentions": True, "output_hidden_states": True, "labels": torch.zeros(2)},
    **{"nonsense": 3, "decoder_input_ids": ids(), "encoder_outputs": ids(), CACHE: ids(), "atention_mask": ids()},
}


@pytest.mark.slow
def test_token_types_that_the_graph_does_not_take(tmp_path):
    """Zeros are what BERT assumes, and so are they here; others were ignored."""
    model = FAMILIES["bert"].build().eval()
    export(model, tmp_path / "served", batches=[{"input_ids": ids(3, 7)}])
    served, inputs = load_exported(tmp_path / "served", threads=1), {"input_ids": ids()}
    assert served.names == {"input_ids", "attention_mask"}
    assert_same(model, served, inputs, {"token_type_ids": torch.zeros_like(ids())})
    assert_same(model, served, inputs, OUTPUT_FLAGS | {"position_ids": None})
    assert_refused(served, inputs, NOT_TAKEN | {"token_type_ids": torch.ones_like(ids())})
    with pytest.raises(ArgumentError, match="and has zeros for token_type_ids"):
        served(**inputs, token_type_ids=torch.ones_like(ids()))


def test_what_the_graph_of_an_encoder_does_not_take(folder):
    model, served = FAMILIES["bert"].build().eval(), load_exported(folder, threads=1)
    inputs = {"input_ids": ids()}
    assert_same(model, served, inputs, OUTPUT_FLAGS | {"position_ids": None})
    assert_refused(served, inputs, NOT_TAKEN)
    with pytest.raises(ArgumentError, match=r"no atention_mask, .*did you mean 'attention_mask'"):
        served(**inputs, atention_mask=ids())


@pytest.mark.slow
def test_token_types_of_a_model_that_takes_none_for_no_zeros(tmp_path):
    """GPT-2 adds the embedding of the token 0 where it is given token types of zero."""
    family = FAMILIES["gpt2"]
    model = family.build().eval()
    export(model, tmp_path / "served")
    served, inputs = load_exported(tmp_path / "served", threads=1), {"input_ids": ids()}
    assert_same(model, served, inputs, OUTPUT_FLAGS | {"use_cache": True, "logits_to_keep": 0})
    assert_same(model, served, inputs, {"position_ids": torch.arange(6).expand(2, 6)})
    assert_same(model, served, inputs, {"position_ids": torch.arange(6).flip(0).expand(2, 6)})  # an input of the graph
    others = {"token_type_ids": torch.zeros_like(ids()), "nonsense": 1, "logits_to_keep": 1, "labels": ids()}
    assert_refused(served, inputs, others | {"decoder_input_ids": ids(), "encoder_outputs": ids()})
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    for each in ({}, {"num_beams": 2}, {"use_cache": False}, {"attention_mask": torch.ones_like(ids())}):
        assert torch.equal(served.generate(**inputs, **options, **each), model.generate(**inputs, **options, **each))
    with pytest.raises(ArgumentError, match="the graph takes no output_attentions"):
        served.generate(**inputs, **options, output_attentions=True, return_dict_in_generate=True)
    with pytest.raises(ArgumentError, match="the graph takes input_ids"):
        served(inputs_embeds=torch.ones(2, 6, 32))


@pytest.mark.slow
@pytest.mark.parametrize("name", ("marian", "whisper"))
def test_encoder_decoders(name, tmp_path):
    model = FAMILIES[name].build().eval()
    export(model, tmp_path / "served")
    served = load_exported(tmp_path / "served", threads=1)
    if name == "whisper":
        frames = torch.randn(2, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        inputs = {"input_features": frames}
    else:
        inputs = {"input_ids": ids()}
    target = {"decoder_input_ids": ids(2, 3)}
    assert_same(model, served, inputs, OUTPUT_FLAGS | target | {"use_cache": False})
    mask = torch.ones(2, 3, dtype=torch.long)
    assert_same(model, served, inputs, target | {"decoder_attention_mask": mask})
    hidden = mask.clone()
    hidden[0, 0] = 0
    others = {"decoder_attention_mask": hidden, "nonsense": 1, "labels": ids(2, 3), "position_ids": ids(2, 3)}
    assert_refused(served, inputs | target, others)
    assert_refused(served.get_encoder(), inputs, {"nonsense": 1, "output_hidden_states": True})
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    if name == "marian":  # whisper's own `generate` adds tokens
        for each in ({}, {"num_beams": 2}, {"attention_mask": torch.ones_like(ids())}):
            assert torch.equal(
                served.generate(**inputs, **options, **each), model.generate(**inputs, **options, **each)
            )
        states = model.get_encoder()(**inputs)
        with pytest.raises(
            ArgumentError, match=r"encoder_outputs are not those of this model: pass what its get_encoder"
        ):
            served(encoder_outputs=states, **target)
    else:
        assert_refused(served, inputs | target, {"attention_mask": torch.zeros(2, 8)})


@pytest.mark.slow
def test_an_encoder_decoder_without_a_head(tmp_path):
    """It does not generate: one graph takes both texts."""
    model = FAMILIES["marian"].build().base_model.eval()
    inputs = {"input_ids": ids(), "decoder_input_ids": ids(2, 3)}
    export(model, tmp_path / "served", batches=[inputs])
    assert_same(model, load_exported(tmp_path / "served", threads=1), inputs, {})
