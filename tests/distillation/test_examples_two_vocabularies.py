"""Distillation of a model whose vocabulary was trimmed: each model reads its own tokens, and means are compared."""

import copy

import pytest
import torch
from tokenizers_made import FEW, TEXTS, fast, sentences
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
)
from unchanged import assert_unchanged, snapshot

from collab_heads import compress, distill, trim_vocabulary
from collab_heads.distillation.examples import embeddings, inputs_of, joined
from collab_heads.distillation.gap import mean_over_tokens, read_parts
from collab_heads.errors import ArgumentError, CalibrationError, UnsupportedModelError
from families import FAMILIES

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
FP32_NOISE = 1e-5  # the same rows with other padding, and products in another order


def bert(tokenizer, cls=BertModel):
    torch.manual_seed(0)
    model = cls(BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SIZES)).eval()
    with torch.no_grad():  # so that states differ by their words
        model.get_input_embeddings().weight *= 20
    return model


def read(tokenizer, texts, size=8):
    return [
        dict(tokenizer(texts[start : start + size], padding=True, return_tensors="pt", return_token_type_ids=False))
        for start in range(0, len(texts), size)
    ]


@pytest.fixture
def trimmed():
    """A model without most of its tokens, its original, and the batches of each."""
    tokenizer = fast("WordPiece")
    original = bert(tokenizer)
    model = copy.deepcopy(original)
    made, report = trim_vocabulary(model, tokenizer, FEW, show_progress=False)
    texts = sentences(128, seed=3)
    with torch.no_grad():  # transformers hooks into a model when states are first asked for, and stays there
        for each, its in ((model, made), (original, tokenizer)):
            each(**read(its, texts[:1])[0], output_hidden_states=True)
    assert report.tokens_after < 0.7 * report.tokens_before
    return model, original, read(made, texts), read(tokenizer, texts)


def test_a_trimmed_model_learns_the_words_that_it_lost(trimmed):
    model, original, ours, theirs = trimmed
    before, table = snapshot(original), model.get_input_embeddings().weight.clone()
    rest = {n: p.clone() for n, p in model.named_parameters() if "word_embeddings" not in n}
    report = distill(model, original, ours, steps=40, original_batches=theirs, learning_rate=0.05)
    assert report.after.total(1.0) < 0.8 * report.before.total(1.0)
    assert report.trained_parameters == table.numel()
    assert not torch.equal(model.get_input_embeddings().weight, table)
    assert all(torch.equal(p, rest[n]) for n, p in model.named_parameters() if n in rest)
    assert_unchanged(original, before)


@pytest.mark.slow
def test_layers_that_were_compressed_are_trained_as_well(trimmed):
    model, original, ours, theirs = trimmed
    compress(model, ours, 0.5, refine_steps=2)
    before = {n: p.clone() for n, p in model.named_parameters()}
    report = distill(model, original, ours, steps=40, original_batches=theirs)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert report.after.total(1.0) < report.before.total(1.0)
    assert any("word_embeddings" in name for name in moved) and any("attention" in name for name in moved)
    assert not any("LayerNorm" in name for name in moved)


@pytest.mark.slow
def test_a_killed_run_goes_on(trimmed, tmp_path):
    model, original, ours, theirs = trimmed
    other = copy.deepcopy(model)
    options = {"steps": 6, "original_batches": theirs, "output_dir": tmp_path, "checkpoint_every": 2}
    distill(model, original, ours, **options | {"output_dir": None})
    taken = iter(range(4))

    def dying(module, args, kwargs):
        if module.training is False and torch.is_grad_enabled() and next(taken, None) is None:
            raise KeyboardInterrupt

    hook = other.register_forward_pre_hook(dying, with_kwargs=True)
    with pytest.raises(KeyboardInterrupt):
        distill(other, original, ours, **options)
    hook.remove()
    assert (tmp_path / "distillation").exists()
    distill(other, original, ours, **options)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_the_gap_is_that_of_means_over_tokens(trimmed):
    model, original, ours, theirs = trimmed
    batch = joined(model, original, ours[:1], theirs[:1])[0]
    for each, mine, is_original in ((model, ours[0], False), (original, theirs[0], True)):
        inputs = inputs_of(batch, is_original)
        with torch.no_grad():
            outputs = each(**inputs, output_hidden_states=True)
            wanted = each(**mine, output_hidden_states=True).hidden_states[1:]
        found = read_parts(each, inputs, outputs, by_example=True)
        for states, part in zip((*wanted, wanted[-1]), found, strict=True):
            mask = mine["attention_mask"][..., None]
            mean = (states * mask).sum(1) / mask.sum(1)
            torch.testing.assert_close(part.rows, mean, rtol=0, atol=FP32_NOISE)


@torch.no_grad()
def pooled(model, batches) -> torch.Tensor:
    """The mean of the last hidden states over the tokens of each text, in float64."""
    rows = []
    for batch in batches:
        states, mask = model(**batch).last_hidden_state.double(), batch["attention_mask"][..., None]
        rows.append((states * mask).sum(1) / mask.sum(1))
    return torch.cat(rows)


def test_the_error_compares_what_each_model_reads(trimmed):
    model, original, ours, theirs = trimmed
    wanted, found = pooled(original, theirs[7::8]), pooled(model, ours[7::8])  # every eighth batch is held out
    error = (found - wanted).square().sum() / (wanted - wanted.mean(0)).square().sum()
    report = distill(model, original, ours, steps=1, original_batches=theirs)
    assert report.before.output == pytest.approx(float(error), rel=FP32_NOISE)


def test_the_mean_of_states_without_a_mask():
    states = torch.arange(12.0).view(1, 3, 4)
    torch.testing.assert_close(mean_over_tokens(states, None), states.mean(1))


def test_models_of_one_vocabulary_have_no_gap_however_they_are_padded():
    tokenizer = fast("WordPiece")
    original = bert(tokenizer, BertForSequenceClassification)
    model, texts = copy.deepcopy(original), TEXTS[:64]
    padded = [{n: torch.nn.functional.pad(t, (0, 3)) for n, t in batch.items()} for batch in read(tokenizer, texts)]
    report = distill(model, original, read(tokenizer, texts), steps=1, original_batches=padded, learning_rate=1e-9)
    assert report.before.total(1.0) < FP32_NOISE


def test_of_a_model_of_texts_and_images_the_embeddings_of_tokens_are_trained():
    model = FAMILIES["clip"].build()
    assert list(embeddings(model)) == ["text_model.embeddings.token_embedding.weight"]


def test_batches_that_do_not_fit_each_other(trimmed):
    model, original, ours, theirs = trimmed
    before = snapshot(model)
    with pytest.raises(CalibrationError, match=f"{len(ours)} batches and {len(ours) - 1} original_batches"):
        distill(model, original, ours, original_batches=theirs[1:])
    fewer = [theirs[0], {name: tensor[:3] for name, tensor in theirs[1].items()}, *theirs[2:]]
    with pytest.raises(CalibrationError, match="batch 1 holds 8 examples for the model and 3"):
        distill(model, original, ours, original_batches=fewer)
    with pytest.raises(ArgumentError, match="begin with 'original:'"):
        marked = [batch | {"original:x": batch["input_ids"]} for batch in ours]
        distill(model, original, marked, original_batches=theirs)
    with pytest.raises(ArgumentError, match="pass original_batches"):
        distill(model, original, ours)
    assert_unchanged(model, before)


def test_models_that_write_tokens_are_refused():
    tokenizer = fast("WordPiece")
    texts, special = sentences(16, seed=3), {"bos_token_id": 1, "eos_token_id": 2}
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=4, **special))
    for original, message in ((bert(tokenizer, BertForMaskedLM), "logits for every token"), (gpt2, "writes tokens")):
        model = copy.deepcopy(original)
        made, _ = trim_vocabulary(model, tokenizer, FEW, show_progress=False)
        with pytest.raises(UnsupportedModelError, match=message):
            distill(model, original, read(made, texts), original_batches=read(tokenizer, texts))


def test_other_differences_are_refused(trimmed):
    model, original, ours, theirs = trimmed
    original.config.layer_norm_eps = 1e-3
    with pytest.raises(ArgumentError, match="layer_norm_eps"):
        distill(model, original, ours, original_batches=theirs)
