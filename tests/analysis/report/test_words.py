"""Words from the pieces of every kind of vocabulary."""

import pytest
from tokenizers_made import fast

from collab_heads.analysis.measures.token_texts import BYTES, LETTERS, read_back, token_texts
from collab_heads.analysis.report.page_data import shown
from collab_heads.analysis.report.words import words_of

TEXT = "The unhappiest dogs, well-known, ran."
WORDS = ["The", "unhappiest", "dogs", ",", "well", "-", "known", ",", "ran", "."]


@pytest.mark.parametrize(
    ("tokens", "words"),
    (
        ("[CLS] un ##happi ##est dogs , ran . [SEP]", "[CLS] unhappiest dogs , ran . [SEP]"),
        ("<s> \u2581un happi est \u2581dogs , \u2581ran . </s>", "<s> unhappiest dogs , ran . </s>"),
        ("un happi est \u0120dogs , \u0120ran . <|im_end|>", "unhappiest dogs , ran . <|im_end|>"),
        ("un happi est</w> dogs</w> ,</w> ran</w> .</w>", "unhappiest dogs , ran ."),
        ("un@@ happi@@ est dogs , ran .", "unhappiest dogs , ran ."),
    ),
)
def test_words_by_the_marks_of_their_pieces(tokens, words):
    found = words_of(tokens.split(), [shown(token) for token in tokens.split()])
    assert found["texts"] == words.split()
    lengths = [b - a for a, b in zip(found["starts"], [*found["starts"][1:], len(tokens.split())], strict=True)]
    assert sorted(lengths) == [1] * (len(words.split()) - 1) + [3] and sum(lengths) == len(tokens.split())


@pytest.mark.parametrize("kind", ("WordPiece", "Unigram", "byte-level BPE"))
def test_every_kind_of_tokenizer_has_the_same_words(kind):
    backwards = " ".join(2 * word[::-1] for word in WORDS)  # so that words fall to pieces
    tokenizer = fast(kind, [backwards, " ".join(TEXT)])
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(TEXT)["input_ids"])
    found = words_of(tokens, [shown(token) for token in tokens])
    assert "<unk>" not in tokens and len(tokens) > len(WORDS) + 2
    assert found["texts"] == ["<s>", *WORDS, "</s>"]


def test_letters_of_several_bytes_are_read_back():
    """Words and punctuation of byte-level vocabularies are those of the text, in every script."""
    text = "Müller sagt: „hallo“ … שלום, 东京!"
    tokenizer = fast("byte-level BPE", [" ".join([text] * 9)])
    ids = tokenizer(text)["input_ids"]
    assert any("Ã¼" in token for token in tokenizer.convert_ids_to_tokens(ids))
    tokens = token_texts(ids, tokenizer)
    words = ["<s>", "Müller", "sagt", ":", "„", "hallo", "“", "…", "שלום", ",", "东京", "!", "</s>"]
    assert words_of(tokens, [shown(token) for token in tokens])["texts"] == words


def test_tokens_of_other_vocabularies_stay_as_they_are():
    """Their letters stand for themselves, also those with which bytes are spelled; and so do pieces of letters."""
    tokenizer = fast("WordPiece", ["an"])
    tokenizer.add_tokens(["Ã¼"])
    assert token_texts([len(tokenizer) - 1], tokenizer) == ("Ã¼",)
    assert token_texts([7, 3], None) == ("7", "3")
    spelled = "".join(map(LETTERS.get, "ü".encode()))
    assert (read_back(spelled), read_back(spelled[0]), read_back("<▁>")) == ("ü", spelled[0], "<▁>")
    assert read_back("Ġ" + spelled) == "Ġü" and read_back("Ċ") == "Ċ"
    assert sorted(LETTERS) == [*range(256)] and len(BYTES) == 256


def test_without_marks_nothing_is_known():
    assert words_of(["0", "1", "2"], ["0", "1", "2"]) is None and words_of([], []) is None


def test_a_mark_alone_stays_readable():
    found = words_of(["\u2581", "\u2581a", "##", "b"], ["\u2423", "\u2423a", "##", "b"])
    assert all(found["texts"])
