"""Attention maps of a few sentences: the model's own, without padding, with the tokens that they are of."""

import pytest
import torch
from heads_by_hand import LENGTHS, STEPS, ended, maps_by_hand, model_in, sites_with_heads
from model_inputs import cast
from model_sizes import EXACT64, FP32_NOISE

from collab_heads.analysis.measures.passes import observe
from collab_heads.analysis.measures.sentences import AttentionExamples, typical_sentences

FIRST = [(0, 0)]


class Words:
    """As much of a tokenizer as is used."""

    def convert_ids_to_tokens(self, ids):
        return [f"w{each}" for each in ids]


def examples_of(model, batches, chosen, *options):
    examples = AttentionExamples(chosen, *options)
    observe(model, [cast(each, model.dtype) for each in batches], [examples], exclude=[])
    return examples.kept


@pytest.mark.parametrize("name", ("bert", "marian", "t5", "albert", "bert-decoder"))
def test_maps_are_those_of_the_model(name):
    model, (inputs, _) = model_in(name), ended(name)
    found = examples_of(model, [inputs, inputs], [(1, 0), (0, 1)])
    assert len(found) == 2
    maps = maps_by_hand(model, inputs)
    for row, example in enumerate(found):
        for site in sites_with_heads(model):
            weights, queries, keys = example.of(site)
            lengths = {"encoder": LENGTHS[row], "decoder": STEPS[row] + 1}
            whole = maps[site.path][0][row]
            if name == "bert-decoder":  # padded on the left
                expected = whole[:, 9 - LENGTHS[row] :]
                if site.role == "dec-self":
                    expected = expected[:, :, 9 - LENGTHS[row] :]
                else:
                    expected = expected[:, :, : len(keys)]
            elif site.role == "enc-self":
                expected = whole[:, : lengths["encoder"], : lengths["encoder"]]
            elif site.role == "dec-self":
                expected = whole[:, : len(queries), : len(keys)]
            else:
                expected = whole[:, : len(queries), : lengths["encoder"]]
            tolerance = FP32_NOISE if weights.dtype == torch.float32 else EXACT64
            torch.testing.assert_close(weights.double(), expected.double(), rtol=0, atol=tolerance)
            assert weights.shape == (site.num_heads, len(queries), len(keys))
            if name != "bert-decoder":
                torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-5)


def test_tokens_are_those_that_the_stacks_read():
    model, (inputs, _) = model_in("marian"), ended("marian")
    start = model.config.decoder_start_token_id
    (ids,), (words,) = (examples_of(model, [inputs], FIRST, *more) for more in ((None, start), (Words(), start)))
    source = inputs["input_ids"][0, : LENGTHS[0]].tolist()
    assert ids.tokens["encoder"] == tuple(map(str, source)) and words.tokens["encoder"] == tuple(
        f"w{i}" for i in source
    )
    assert words.tokens["decoder"][0] == f"w{start}"
    labels = {k: v for k, v in inputs.items() if k != "decoder_input_ids"} | {
        "labels": inputs["decoder_input_ids"].roll(-1, 1)
    }
    (shifted,) = examples_of(model, [labels], FIRST, None, start)  # of labels, the decoder reads the start token first
    assert shifted.tokens["decoder"][:2] == (str(start), str(int(labels["labels"][0, 0])))
    read = inputs["decoder_input_ids"][0, 1 : STEPS[0]].tolist()
    assert words.tokens["decoder"][1 : STEPS[0]] == tuple(f"w{i}" for i in read)


def test_what_is_not_there_is_not_kept():
    """A loader that shuffles may have a shorter batch there on the second reading."""
    model, (inputs, _) = model_in("bert"), ended("bert")
    assert examples_of(model, [inputs], []) == [] and len(examples_of(model, [inputs], [(0, 9), (0, 2)])) == 1


@pytest.mark.parametrize("name, lengths", (("bert", LENGTHS), ("marian", LENGTHS), ("gpt2", (9, 9, 9))))
def test_sentences_of_typical_lengths(name, lengths):
    """Lengths 9, 5, 7 and, in a second batch, 9, 5: the median is 7, the thirds are 5 and 9; of equals, the first."""
    model, (inputs, _) = model_in(name), ended(name)
    if name == "gpt2":
        inputs.pop("attention_mask", None)
        assert typical_sentences(model, [inputs], 2) == [(0, 0), (0, 1)]
        shorter = {"input_ids": inputs["input_ids"][:, :5]}  # two more of the median's length, behind
        assert typical_sentences(model, [inputs, shorter], 1) == [(1, 2)]
        return
    batches = [inputs, {key: value[:2] for key, value in inputs.items()}]
    assert typical_sentences(model, batches, 0) == [] and typical_sentences(model, batches, 1) == [(0, 2)]
    assert typical_sentences(model, batches, 2) == [(1, 1), (0, 0)]
    assert typical_sentences(model, batches, 9) == [(0, 1), (1, 1), (0, 2), (0, 0), (1, 0)]
    assert typical_sentences(model, batches, 4) == [(0, 1), (1, 1), (0, 2), (0, 0)]
    if name == "marian":  # without a mask all sources are of one length, whatever the lengths of their translations
        inputs.pop("attention_mask")
        assert typical_sentences(model, [inputs], 2) == [(0, 0), (0, 1)]
