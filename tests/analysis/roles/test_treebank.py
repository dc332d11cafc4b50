"""Batches of a treebank: what is in them, and what is skipped, counted and said."""

import pytest
import torch
import translation_models
from known_heads import PIECES, TREEBANK, rows, word_pieces

from collab_heads.analysis.roles.treebank import Treebank
from collab_heads.errors import ArgumentError, DataError
from collab_heads.files.conllu import read_conllu
from families import FAMILIES


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "bank.conllu"
    file.write_text(TREEBANK, encoding="utf-8")
    return file


def test_batches_are_by_length_padded_and_can_be_read_again(path, warnings_logged):
    bank = Treebank(path, word_pieces(), FAMILIES["bert"].build(), batch_size=2)
    assert [sentence.words[0] for sentence, _ in bank.sentences] == ["Dogs", "Old", "She"] and len(bank) == 2
    first, second = bank
    assert {name: tuple(value.shape) for name, value in first.items()} == {
        "input_ids": (2, 10),
        "attention_mask": (2, 10),
    }
    assert [PIECES[i] for i in first["input_ids"][0]] == "[CLS] dog ##s were seen . [SEP] [PAD] [PAD] [PAD]".split()
    assert first["attention_mask"].sum(1).tolist() == [7, 10] and second["attention_mask"].sum(1).tolist() == [10]
    assert [len(bank.batch(index)) for index in range(2)] == [2, 1]
    assert bank.skipped == {"too long": 0, "not aligned": 0} and bank.limit == 64 and not warnings_logged.records
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(bank, bank, strict=True))
    assert len(Treebank(read_conllu(path), word_pieces(), FAMILIES["bert"].build(), batch_size=3)) == 1


def test_what_is_skipped_is_counted_and_said(path, warnings_logged):
    path.write_text(TREEBANK + rows("1 Old 0 root", "2 \u200b 1 x"), encoding="utf-8")
    bank = Treebank(path, word_pieces(model_max_length=9), FAMILIES["bert"].build())
    assert bank.skipped == {"too long": 2, "not aligned": 1} and len(bank.sentences) == 1 and bank.limit == 9
    (record,) = warnings_logged.records
    for part in (str(path), "3 of 4 sentences are skipped", "2 longer than the 9 tokens", "1 not aligned"):
        assert part in record.getMessage()
    exact = Treebank(path, word_pieces(model_max_length=10), FAMILIES["bert"].build())
    assert exact.skipped == {"too long": 0, "not aligned": 1}


def test_nothing_left_is_refused(path):
    with pytest.raises(DataError, match=r"bank\.conllu: none of 3 sentences .* 3 longer than the 6 tokens"):
        Treebank(path, word_pieces(model_max_length=6), FAMILIES["bert"].build())


@pytest.mark.parametrize("family", ("marian", "t5"))
def test_encoder_decoders_run(tmp_path, path, family):
    tokenizer, model = translation_models.tokenizer(family, tmp_path / family), translation_models.model(family)
    bank = Treebank(path, tokenizer, model)
    (inputs,) = bank
    assert inputs["decoder_input_ids"].shape == (3, 1) and len(bank.sentences) == 3
    assert bool((inputs["input_ids"] == tokenizer.pad_token_id).eq(inputs["attention_mask"] == 0).all())
    model(**inputs)


def test_wrong_arguments(path):
    model = FAMILIES["bert"].build()
    for size in (0, 1.5, True):
        with pytest.raises(ArgumentError, match="batch_size"):
            Treebank(path, word_pieces(), model, batch_size=size)
    with pytest.raises(ArgumentError, match=r"expected the model's tokenizer, not str"):
        Treebank(path, "bert", model)
    other = word_pieces()
    other.add_tokens([f"x{i}" for i in range(60)] + ["dogs"])
    with pytest.raises(ArgumentError, match=r"gives the id \d+, but the BertForSequenceClassification has 61"):
        Treebank(path, other, model)
    with pytest.raises(DataError, match="No such file"):
        Treebank(path.with_name("none"), word_pieces(), model)
