"""Which tokens count as queries: no padding and no ends of sentences, on either side, whatever the batch holds."""

import pytest
import torch
from changed_heads import adapter_sites
from heads_by_hand import EOS, LENGTHS, STEPS, assert_alike, ended, far, measure, model_in, single
from model_configs import marian_config
from model_inputs import cast
from model_sizes import EXACT64, FP32_NOISE, WIDTH
from transformers import BartForSequenceClassification, BartModel

from collab_heads.analysis import head_statistics
from collab_heads.analysis.measures.passes import end_tokens
from collab_heads.running.batches import decoder_ids
from families import FAMILIES, make


@pytest.mark.parametrize("exclude", ([EOS], []))
@pytest.mark.parametrize("name", ("bert", "distilbert", "marian", "t5", "labels"))
def test_a_padded_batch_is_its_sentences_one_by_one(name, exclude):
    """With labels, the last step of a decoder is that with the last label, however long the others are."""
    family, labels = ("marian", True) if name == "labels" else (name, False)
    model, (inputs, _) = model_in(family), ended(family)
    steps = STEPS
    if labels:
        ids = inputs.pop("decoder_input_ids")
        inputs["labels"] = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
        inputs["labels"][0, 5] = EOS
        inputs["labels"][inputs["labels"] == model.config.pad_token_id] = -100
    elif not exclude:
        steps = [min(6, step + 1) for step in STEPS]  # the end of the sentence is read, too
    singles = [single(inputs, row, LENGTHS[row], steps[row]) for row in range(3)]
    padded, apart = measure(model, [inputs], exclude=exclude), measure(model, singles, exclude=exclude)
    assert_alike(padded, apart, FP32_NOISE if family == "t5" else EXACT64)  # T5's norms are in float32
    assert padded.tokens == apart.tokens
    encoder = padded.sites[0].path
    assert padded.tokens[encoder] == sum(LENGTHS) - 3 * bool(exclude)
    if padded.sites[-1].role == "dec-enc":
        assert padded.tokens[padded.sites[-1].path] == sum(steps)


@pytest.mark.parametrize("name", ("bert", "marian", "t5", "bert-decoder"))
def test_ends_and_padding_would_show(name):
    """What does not count differs from what counts: else the tests above would pass without a mask."""
    model, (inputs, _) = model_in(name), ended(name)
    path = adapter_sites(model)[-1].path
    found, with_ends = measure(model, [inputs]), measure(model, [inputs], exclude=[])
    assert with_ends.tokens[path] > found.tokens[path] and far(found, with_ends, path)
    without = {key: value for key, value in inputs.items() if key != "attention_mask"}
    if name == "bert":
        unmasked = measure(model, [without])
        assert unmasked.tokens[path] > found.tokens[path] and far(found, unmasked, path)


@pytest.mark.parametrize("name", ("marian", "bart", "mbart", "m2m_100", "pegasus", "t5", "mt5"))
def test_labels_are_what_the_decoder_reads_shifted_right(name):
    """As decoder inputs made of them by the model itself, and as both together (what collators give)."""
    model, (inputs, _) = model_in(name), ended(name)
    pad, ids = model.config.pad_token_id, inputs.pop("decoder_input_ids")
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], pad)], dim=1)
    labels[0, 5] = EOS
    labelled = inputs | {"labels": labels.masked_fill(labels == pad, -100)}
    read, decoder = [], model.get_decoder()
    handle = decoder.register_forward_pre_hook(lambda m, a, kw: read.append(kw["input_ids"]), with_kwargs=True)
    found = measure(model, [labelled])
    handle.remove()
    (read,) = read
    assert torch.equal(decoder_ids(model, labelled)[:, 1:], read[:, 1:])
    given = measure(model, [inputs | {"decoder_input_ids": read}])
    both = measure(model, [labelled | {"decoder_input_ids": read}])
    for same in (given, both):  # masks of their own: attention may take another path
        assert same.tokens == found.tokens
        assert_alike(same, found)
    assert found.tokens[found.sites[-1].path] == sum(STEPS)  # the start token counts, M2M100's too, which is EOS


@pytest.mark.parametrize("task", (BartModel, BartForSequenceClassification))
def test_a_decoder_that_reads_the_source(task):
    """BART's base model and its classifiers shift the source; labels of classes are not tokens."""
    model = make(task, marian_config(FAMILIES["bart"].build().config_class)).double()
    inputs, _ = ended("bert")
    inputs["input_ids"][inputs["attention_mask"] == 0] = model.config.pad_token_id
    if task is BartForSequenceClassification:
        inputs["labels"] = torch.tensor([0, 1, 1])
    read, decoder = [], model.base_model.decoder
    handle = decoder.register_forward_pre_hook(lambda m, a, kw: read.append(kw["input_ids"]), with_kwargs=True)
    found = measure(model, [inputs])
    handle.remove()
    assert torch.equal(decoder_ids(model, inputs)[:, 1:], read[0][:, 1:])
    counts = (read[0] != EOS) & (read[0] != model.config.pad_token_id)
    counts[:, 0] = True
    assert found.tokens[found.sites[-1].path] == int(counts.sum()) == sum(LENGTHS)
    assert found.tokens[found.sites[0].path] == sum(LENGTHS) - 3


def test_decoder_masks_and_embeddings():
    """A mask of the caller's counts; embeddings have no ids to leave out."""
    model, (inputs, counts) = model_in("marian"), ended("marian")
    expected = measure(model, [inputs])
    mask = (inputs["decoder_input_ids"] != 1).long()
    mask[:, 0] = 1
    assert_alike(measure(model, [inputs | {"decoder_attention_mask": mask}]), expected)
    shorter = mask.clone()
    shorter[:, -1] = 0
    found = measure(model, [inputs | {"decoder_attention_mask": shorter}])
    assert found.tokens[found.sites[-1].path] == int((counts["decoder"] & shorter.bool()).sum()) == sum(STEPS) - 1
    embedded = {key: value for key, value in inputs.items() if key != "decoder_input_ids"}
    embedded["decoder_inputs_embeds"] = torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(4))
    found = measure(model, [embedded])
    assert found.tokens[found.sites[-1].path] == 18 and found.tokens[found.sites[0].path] == sum(LENGTHS) - 3


def test_the_ids_that_end_a_sentence():
    model = model_in("marian")
    assert end_tokens(model) == (EOS,)
    model.generation_config.eos_token_id = [7, EOS, 5]
    assert end_tokens(model) == (EOS, 5, 7)
    model.config.sep_token_id = 9
    assert end_tokens(model) == (EOS, 5, 7, 9)
    inputs, _ = ended("marian")
    assert head_statistics(model, [inputs]).excluded == (EOS, 5, 7, 9)
    assert end_tokens(model_in("bert")) == ()


def test_a_config_that_names_no_end_is_said(warnings_logged):
    model, (inputs, _) = model_in("bert"), ended("bert")
    measure(model, [inputs])
    measure(model, [inputs], exclude=[])
    if "vit" in FAMILIES:
        head_statistics(model_in("vit"), [cast(ended("vit")[0], torch.float64)])
    head_statistics(model_in("marian"), [ended("marian")[0]])
    assert "end-of-sentence" not in warnings_logged.text
    for _ in range(2):
        found = head_statistics(model, [inputs])
    assert found == measure(model, [inputs], exclude=[])
    assert warnings_logged.text.count("BertForSequenceClassification names no end-of-sentence token") == 1
