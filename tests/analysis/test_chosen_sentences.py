"""Sentences of the user's choice: the maps of what the model reads, long texts in pieces; no measure counts them."""

import pytest
import torch
from heads_by_hand import EOS, ended, model_in
from known_heads import word_pieces
from model_inputs import cast
from tokenizers_made import fast
from unchanged import refused

from collab_heads import analyze_heads
from collab_heads.analysis.chosen_sentences import LONGEST, chosen_batches, pieces_of
from collab_heads.analysis.report.page_data import page_data
from collab_heads.errors import ArgumentError, DataError

TEXTS = ["the dog runs", "a cat"]


def analyzed(name: str = "bert", **given):
    model = model_in(name)
    options = {"parts": "statistics", "exclude": [EOS]} | given
    return analyze_heads(model, [cast(ended(name)[0], model.dtype)], **options)


def test_chosen_sentences_come_first_and_count_in_no_measure():
    tokenizer = word_pieces()
    plain, report = (analyzed(tokenizer=tokenizer, sentences=texts) for texts in ((), TEXTS))
    assert report.statistics == plain.statistics and report.data == plain.data
    assert [example.chosen for example in report.examples] == [True] * 2 + [False] * len(plain.examples)
    assert [example.tokens for example in report.examples[2:]] == [example.tokens for example in plain.examples]
    for text, example in zip(TEXTS, report.examples, strict=False):
        ids = tokenizer(text)["input_ids"]
        assert example.tokens["encoder"] == tuple(tokenizer.convert_ids_to_tokens(ids))
        model = model_in("bert")
        model.set_attn_implementation("eager")
        with torch.no_grad():
            seen = model(input_ids=torch.tensor([ids]), output_attentions=True).attentions
        for site, weights in zip(report.sites, seen, strict=True):
            torch.testing.assert_close(example.weights[site.path], weights[0].float(), rtol=0, atol=1e-5)
    assert page_data(report)["first"] == 0 and page_data(plain)["first"] == 1
    assert len(analyzed(tokenizer=tokenizer, sentences=TEXTS, num_examples=0, parts="relevance").examples) == 2


def test_inputs_and_pairs():
    inputs, _ = ended("marian")
    report = analyzed("marian", sentences=[cast(inputs, torch.float64)], num_examples=0)
    assert len(report.examples) == 3 and all(example.chosen for example in report.examples)
    tokenizer = fast("Unigram", [" ".join(TEXTS)])
    batches, _ = chosen_batches(model_in("marian"), tokenizer, [(TEXTS[0], TEXTS[1])])
    assert batches[0]["input_ids"][0].tolist() == tokenizer(TEXTS[0])["input_ids"]
    assert batches[0]["labels"][0].tolist() == tokenizer(text_target=TEXTS[1])["input_ids"]


@pytest.mark.parametrize("kind", ("WordPiece", "Unigram", "byte-level BPE"))
def test_a_long_text_is_shown_in_pieces(kind):
    """All of its tokens are shown once, in order, each piece between the special tokens."""
    text = " ".join(map(str, range(500)))
    tokenizer = fast(kind, [text])
    ids = tokenizer(text)["input_ids"]
    for most in (7, 100, len(ids) - 1, len(ids)):
        pieces = [piece["input_ids"][0].tolist() for piece in pieces_of(tokenizer, text, most)]
        assert all(len(piece) <= most and piece[:1] == ids[:1] and piece[-1:] == ids[-1:] for piece in pieces)
        assert [each for piece in pieces for each in piece[1:-1]] == ids[1:-1]
        assert len(pieces) == -(-(len(ids) - 2) // (most - 2))


def test_how_long_a_piece_is():
    """As the model reads at most, and never longer than a map can be shown; the report says so."""
    model, tokenizer = model_in("bert"), word_pieces()
    text = "the dog " * 100
    batches, notes = chosen_batches(model, tokenizer, [text])
    assert max(batch["input_ids"].shape[1] for batch in batches) == model.config.max_position_embeddings < LONGEST
    assert notes == [f"the sentence {text[:39] + '…'!r} is shown in {len(batches)} pieces of at most 64 tokens"]
    model.config.max_position_embeddings = tokenizer.model_max_length = 10**6
    longer, _ = chosen_batches(model, tokenizer, [text * 10])
    assert max(batch["input_ids"].shape[1] for batch in longer) == LONGEST
    report = analyzed(tokenizer=word_pieces(), sentences=[text], num_examples=0)
    assert len(report.examples) == len(batches) and "is shown in" in str(report)


def test_refusals():
    tokenizer = word_pieces()
    for wrong, message in (
        ("the dog", "sentences must be a list"),
        ([1], "sentences must be a list"),
        ({"input_ids": torch.ones(1, 2).long()}, "sentences is a single dict: pass a list"),
        ([("a", "b", "c")], "sentences must be a list"),
        (["a", ""], r"sentences\[1\] has an empty text"),
        (torch.zeros(2), "sentences is a single Tensor: pass a list of texts"),
    ):
        with pytest.raises(ArgumentError, match=message):
            analyzed(tokenizer=tokenizer, sentences=wrong)
    with pytest.raises(DataError, match=r"sentences\[1\]: .* is half of a pair of surrogates"):
        analyzed(tokenizer=tokenizer, sentences=["a", "b\udcff"])
    with pytest.raises(ArgumentError, match="needs the model's tokenizer"):
        analyzed(sentences=["the dog"])
    with refused(model := model_in("marian"), ArgumentError, "also reads what it generates", "pass a pair"):
        analyze_heads(model, [ended("marian")[0]], tokenizer=tokenizer, sentences=["the dog"])
    with pytest.raises(ArgumentError, match="pairs may have 64: pass a shorter pair"):
        chosen_batches(model_in("bert"), tokenizer, [("the dog " * 50, "a cat")])
