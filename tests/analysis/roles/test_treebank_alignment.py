"""Words and their sub-word tokens, with offsets and without."""

import pytest
import translation_models
from known_heads import CLS, DOGS, PIECES, SEP, SINGS, rows, word_pieces

from collab_heads.analysis.roles.treebank import align, piece_spans
from collab_heads.demo import corpus
from collab_heads.files.conllu import read_conllu


def parsed(folder, text):
    path = folder / "one.conllu"
    path.write_text(text, encoding="utf-8")
    (sentence,) = read_conllu(path)
    return sentence


def chain(*forms) -> str:
    """A sentence whose words all depend on the first."""
    return rows(*(f"{i} {form} {0 if i == 1 else 1} dep" for i, form in enumerate(forms, 1)))


def shown(aligned, tokenizer, sentence):
    """Word -> its pieces."""
    pieces = tokenizer.convert_ids_to_tokens(list(aligned.ids))
    return {
        word: [piece for piece, unit in zip(pieces, aligned.token_units, strict=True) if unit == mine]
        for word, mine in zip(sentence.words, aligned.word_units, strict=True)
    }


class NoOffsets:
    """A tokenizer as it would be without offsets."""

    is_fast = False

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, text, **options):
        return {"input_ids": self.tokenizer(text, **options)["input_ids"]}

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("wrap", (lambda tokenizer: tokenizer, NoOffsets))
def test_word_pieces(tmp_path, wrap):
    tokenizer = wrap(word_pieces())
    sentence = parsed(tmp_path, SINGS)
    aligned = align(sentence, tokenizer)
    assert aligned.ids[0] == CLS and aligned.ids[-1] == SEP
    assert [PIECES[i] for i in aligned.ids[1:-1]] == ["she", "does", "##n", "'", "t", "often", "sing", "."]
    assert aligned.token_units == (-1, 0, 1, 2, 2, 2, 3, 4, 5, -1) and aligned.word_units == (0, 1, 2, 3, 4, 5)
    assert aligned.num_units == 6
    dogs = parsed(tmp_path, DOGS)
    assert shown(align(dogs, tokenizer), tokenizer, dogs)["dogs"] == ["dog", "##s"]


def test_words_that_no_token_tells_apart_are_one(tmp_path):
    tokenizer = word_pieces()
    sentence = parsed(tmp_path, rows("1 She 0 root", "2-3 cannot _ _", "2 can 1 x", "3 not 1 x", "4 sing 1 x"))
    aligned = align(sentence, tokenizer)
    assert aligned.token_units == (-1, 0, 1, 2, -1) and aligned.word_units == (0, 1, 1, 2) and aligned.num_units == 3
    sentence = parsed(tmp_path, rows("1-2 du _ _", "1 de 3 case", "2 le 3 det", "3 Dog 0 root"))
    aligned = align(sentence, tokenizer)
    assert aligned.token_units == (-1, 0, 1, -1) and aligned.word_units == (0, 0, 1)


def test_a_token_belongs_to_the_word_that_holds_most_of_it(tmp_path):
    """ "does" is one token of "doe" + "s", of which it holds three letters, then one."""
    sentence = parsed(tmp_path, rows("1-2 does _ _ SpaceAfter=No", "1 doe 0 root", "2 s 1 x", "3 . 1 x"))
    aligned = align(sentence, word_pieces())
    assert aligned.token_units == (-1, 0, 1, -1) and aligned.word_units == (0, 0, 1)
    sentence = parsed(tmp_path, rows("1-2 doesn't _ _", "1 d 0 root", "2 oesn't 1 x"))
    aligned = align(sentence, word_pieces())
    assert aligned.token_units == (-1, 0, 0, 0, 0, -1) and aligned.word_units == (0, 0)  # "d" has no token of its own


def test_unknown_words_have_a_token(tmp_path):
    sentence = parsed(tmp_path, chain("Zebras", "sing"))
    aligned = align(sentence, word_pieces())
    assert [PIECES[i] for i in aligned.ids] == ["[CLS]", "[UNK]", "sing", "[SEP]"]
    assert aligned.token_units == (-1, 0, 1, -1)
    assert align(sentence, NoOffsets(word_pieces())) is None  # "[UNK]" does not say what it stands for


def test_a_word_without_tokens_is_not_aligned(tmp_path):
    assert align(parsed(tmp_path, chain("old", "\u200b", "dog")), word_pieces()) is None


@pytest.mark.parametrize("family", ("marian", "t5"))
def test_sentence_pieces_with_and_without_offsets(tmp_path, family):
    """Marian's tokenizer has no offsets; T5's has, and the same pieces without them are aligned alike."""
    tokenizer = translation_models.tokenizer(family, tmp_path / family)
    assert tokenizer.is_fast == (family == "t5")
    for line in corpus(20, 3)[0]:
        words = line.split()
        sentence = parsed(tmp_path, chain(*words))
        aligned = align(sentence, tokenizer)
        assert list(aligned.ids) == tokenizer(line)["input_ids"] and aligned.ids[-1] == tokenizer.eos_token_id
        found = shown(aligned, tokenizer, sentence)
        assert all("".join(found[word]).replace("\u2581", "") == word for word in words)
        assert aligned.token_units[-1] == -1 and -1 not in aligned.token_units[:-1]
        if family == "t5":
            assert align(sentence, NoOffsets(tokenizer)) == aligned


def test_characters_that_the_tokenizer_changes(tmp_path):
    """Marian's: unknown characters, ligatures, an accent apart, dots of omission, several spaces, a pound sign."""
    tokenizer = translation_models.tokenizer("marian", tmp_path / "marian")
    text = "# text = the   日本 ﬁne e\u0301… £5 (\u201ea\u201c)\n"
    forms = ("the", "日本", "ﬁne", "e\u0301…", "£", "5", "(", "\u201e", "a", "\u201c", ")")
    sentence = parsed(tmp_path, text + chain(*forms))
    aligned = align(sentence, tokenizer)
    # "£5", "(„" and "“)" are one unknown piece each
    assert aligned.word_units == (0, 1, 2, 3, 4, 4, 5, 5, 6, 7, 7)
    assert "".join(map(str, aligned.token_units[:-1])) == "00112222233333445567" and aligned.token_units[-1] == -1


def test_pieces_lie_one_after_the_other():
    assert piece_spans("a bc", ["\u2581a", "\u2581", "b", "c"]) == [(0, 1), (2, 3), (2, 3), (3, 4)]
    assert piece_spans("Bc", ["b@@", "c</w>"]) == [(0, 1), (1, 2)]
    assert piece_spans("a ##5", ["\u2581a", "\u2581##", "5"]) == [(0, 1), (2, 4), (4, 5)]  # no mark of a continuation
    assert piece_spans("ﬁn", ["f", "in"]) == [(0, 1), (0, 2)]
    assert piece_spans("a", ["\u2581a", "\u2581"]) == [(0, 1), (0, 1)]


@pytest.mark.parametrize("text, pieces", (("ab", ["a"]), ("ab", ["a", "c"]), ("ab", ["ab", "c"]), (" ", ["\u2581"])))
def test_pieces_that_are_not_the_text(text, pieces):
    assert piece_spans(text, pieces) is None
