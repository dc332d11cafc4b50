"""A vocabulary from the data: as large as asked for, laid out as the model type wants it, and always the same."""

import re

import pytest
import sentencepiece
from transformers import AutoTokenizer

from collab_heads.contract.registry import blueprints
from collab_heads.data.tokenizing import train_tokenizer
from collab_heads.demo import corpus
from collab_heads.errors import ArgumentError, DataError

SENTENCES = [line for side in corpus(300, 0) for line in side]
SIZE = 90
SPECIAL = {  # model type -> end, unknown, padding
    "marian": (0, 1, SIZE - 1),
    "t5": (1, 2, 0),
}


@pytest.fixture(params=blueprints())
def model_type(request):
    return request.param


@pytest.fixture
def trained(model_type, tmp_path):
    return train_tokenizer(
        model_type, SENTENCES, SIZE, tmp_path / "new", source_lang="xx", target_lang="en", max_length=40
    )


def test_size_special_pieces_and_settings(trained, model_type):
    assert len(trained) == SIZE
    assert type(trained).__name__ == blueprints()[model_type].vocabulary.tokenizer
    end, unknown, padding = SPECIAL[model_type]
    assert (trained.eos_token_id, trained.unk_token_id, trained.pad_token_id) == (end, unknown, padding)
    assert sorted(trained.all_special_ids) == sorted((end, unknown, padding))
    assert trained.convert_ids_to_tokens([end, unknown, padding]) == ["</s>", "<unk>", "<pad>"]
    assert trained.model_max_length == 40
    assert len({trained.convert_ids_to_tokens(i) for i in range(SIZE)}) == SIZE
    assert trained("the dog \u6f22")["input_ids"].count(unknown) == 1


def test_round_trip(trained):
    for line in SENTENCES:
        ids = trained(line)["input_ids"]
        assert ids == trained(text_target=line)["input_ids"]  # one vocabulary for both sides
        assert ids[-1] == trained.eos_token_id
        assert trained.unk_token_id not in ids
        assert trained.decode(ids, skip_special_tokens=True) == line
    lengths = [len(trained(line)["input_ids"]) / len(line.split()) for line in SENTENCES]
    assert sum(lengths) / len(lengths) < 3  # pieces, not letters


def test_the_same_data_give_the_same_vocabulary(trained, model_type, tmp_path):
    again = train_tokenizer(model_type, SENTENCES, SIZE, tmp_path / "again")
    other = train_tokenizer(model_type, [*corpus(300, 1)[0], *SENTENCES[300:]], SIZE, tmp_path / "other")
    assert again.get_vocab() == trained.get_vocab()
    assert other.get_vocab() != trained.get_vocab()
    for name in blueprints()[model_type].vocabulary.files:
        first, second, third = ((tmp_path / n / name).read_bytes() for n in ("new", "again", "other"))
        assert first == second != third


def test_it_is_saved_and_loaded(trained, tmp_path):
    trained.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert type(loaded) is type(trained)
    assert loaded.get_vocab() == trained.get_vocab()
    assert loaded.model_max_length == 40
    assert [loaded(line)["input_ids"] for line in SENTENCES] == [trained(line)["input_ids"] for line in SENTENCES]
    assert loaded.decode(loaded(SENTENCES[0])["input_ids"], skip_special_tokens=True) == SENTENCES[0]


def test_languages_are_noted(model_type, trained):
    if model_type == "marian":
        assert (trained.source_lang, trained.target_lang) == ("xx", "en")
    assert trained.init_kwargs["source_lang"] == "xx"


@pytest.mark.parametrize(
    "size, message", ((5000, r"so many pieces: (\d+) at most"), (12, r"which need (\d+) at least"))
)
def test_a_size_that_the_data_do_not_allow_is_refused(size, message, model_type, tmp_path):
    """The message says what they do allow, to the piece; nothing is written."""
    with pytest.raises(DataError, match=f"--vocab_size {size}: .*{message}") as caught:
        train_tokenizer(model_type, SENTENCES, size, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    limit = int(re.search(message, str(caught.value))[1])
    assert len(train_tokenizer(model_type, SENTENCES, limit, tmp_path / "new")) == limit
    with pytest.raises(DataError, match=message):
        train_tokenizer(model_type, SENTENCES, limit + (1 if size > limit else -1), tmp_path / "worse")


def test_another_model_type_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"unknown model type for a vocabulary from scratch 'bart'.*marian, t5"):
        train_tokenizer("bart", SENTENCES, SIZE, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_else_sentencepiece_says_is_passed_on(tmp_path, monkeypatch):
    def train(**_):
        raise RuntimeError("INTERNAL: something else")

    monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "train", train)
    with pytest.raises(DataError, match=f"--vocab_size {SIZE}: INTERNAL: something else"):
        train_tokenizer("t5", SENTENCES, SIZE, tmp_path / "new")
