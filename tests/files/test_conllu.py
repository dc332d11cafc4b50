"""CoNLL-U: what is read, and what is refused with file and line."""

import gzip

import pytest
from known_heads import DOGS, SINGS, TREEBANK, rows

from collab_heads.errors import DataError
from collab_heads.files.conllu import read_conllu

NEWLINE = b"\n"


def write(folder, text, name="a.conllu"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_words_heads_relations_text_and_spans(tmp_path):
    dogs, sings, seen = read_conllu(write(tmp_path, TREEBANK))
    assert dogs.words == ("Old", "dogs", "chase", "young", "cats", ".")
    assert dogs.heads == (2, 3, 0, 5, 3, 3) and dogs.sent_id == "dogs" and dogs.line == 3
    assert dogs.relations == ("amod", "nsubj", "root", "amod", "obj", "punct")
    assert dogs.text == "Old dogs chase young cats."
    assert [dogs.text[a:b] for a, b in dogs.spans] == list(dogs.words)
    assert sings.words[1:3] == ("does", "n't") and sings.heads == (5, 5, 5, 5, 0, 5) and sings.sent_id is None
    assert [sings.text[a:b] for a, b in sings.spans] == ["She", "does", "n't", "often", "sing", "."]
    assert seen.text == "Dogs were seen." and seen.relations[0] == "nsubj:pass"  # made from the words


def test_words_that_do_not_make_up_their_token_share_its_span(tmp_path):
    lines = rows("1 bruit 0 root", "2-3 au _ _ SpaceAfter=No", "2 à 4 case", "3 le 4 det", "4 l' 1 x", "5 vin 1 nmod")
    (sentence,) = read_conllu(write(tmp_path, lines))
    assert sentence.text == "bruit aul' vin"  # the range says what follows it, not its words
    assert sentence.spans == ((0, 5), (6, 8), (6, 8), (8, 10), (11, 14))


def test_empty_nodes_are_no_words(tmp_path):
    lines = rows("0.1 _ _ _", "1 Sue 2 nsubj", "2 likes 0 root", "2.1 likes _ _", "2.2 x _ _", "3 tea 2 obj")
    (sentence,) = read_conllu(write(tmp_path, lines))
    assert sentence.words == ("Sue", "likes", "tea") and sentence.heads == (2, 0, 2)
    assert sentence.text == "Sue likes tea"


def test_forms_with_spaces_and_unusual_line_characters(tmp_path):
    """U+2028 and U+0085 end no line; a form may hold a space; '# text' may space words as it likes."""
    words = rows("1 1@000 0 root", "2 a\u2028b 1 x", "3 c\u0085d 1 x").replace("@", " ")
    (sentence,) = read_conllu(write(tmp_path, "# text = 1 000  a\u2028b c\u0085d\n" + words))
    assert sentence.words == ("1 000", "a\u2028b", "c\u0085d") and sentence.spans == ((0, 5), (7, 10), (11, 14))


@pytest.mark.parametrize("name", ("windows", "mark", "gzip", "last", "blank"))
def test_the_same_in_other_wrappings(tmp_path, name):
    wrapped = {
        "windows": TREEBANK.replace("\n", "\r\n").encode(),
        "mark": b"\xef\xbb\xbf" + TREEBANK.encode(),
        "gzip": gzip.compress(TREEBANK.encode()),
        "last": TREEBANK.rstrip("\n").encode(),
        "blank": ("\n\n# newdoc id = 1\n\n" + TREEBANK.replace("\n\n", "\n \t\n\n\n") + "# the end\n").encode(),
    }[name]
    expected = read_conllu(write(tmp_path, TREEBANK))
    found = read_conllu(write(tmp_path, wrapped, "b.conllu.gz" if name == "gzip" else "b.conllu"))
    assert len(found) == 3
    plain = [(s.words, s.heads, s.relations, s.text, s.spans, s.sent_id) for s in expected]
    assert [(s.words, s.heads, s.relations, s.text, s.spans, s.sent_id) for s in found] == plain


BROKEN = {
    "columns": (DOGS.replace("3\tnsubj\t_", "3\tnsubj"), 4, "9 tab-separated columns, expected 10"),
    "spaces": (DOGS.replace("\t", "    "), 3, "1 tab-separated columns"),
    "id": (DOGS.replace("3\tchase", "4\tchase"), 5, "id '4', expected 3"),
    "no number": (DOGS.replace("3\tchase", "x\tchase"), 5, "id 'x'"),
    "zero": (rows("0 a 0 root"), 1, "id '0', expected 1"),
    "two sentences": (DOGS + DOGS, 11, "id '1', expected 7 (is there no empty line"),
    "form": (DOGS.replace("\tchase", "\t"), 5, "id '3' has no form"),
    "head": (DOGS.replace("\t3\tnsubj", "\t_\tnsubj"), 4, "head '_' of word 2 is not a number: is the file parsed?"),
    "negative": (DOGS.replace("\t3\tnsubj", "\t-1\tnsubj"), 4, "head '-1'"),
    "far head": (DOGS.replace("\t3\tnsubj", "\t7\tnsubj"), 4, "word 2 has head 7; there are 6 words"),
    "own head": (DOGS.replace("\t3\tnsubj", "\t2\tnsubj"), 4, "word 2 is its own head"),
    "no root": (DOGS.replace("\t0\troot", "\t2\troot"), 3, "no root"),
    "relation": (DOGS.replace("\tnsubj", "\t_"), 4, "word 2 has a head and no relation"),
    "text": (DOGS.replace("Old dogs", "Old cats"), 4, "'dogs', where '# text' has 'cats chase young cats.'"),
    "more text": (DOGS.replace("cats.\n", "cats. Miaow\n"), 8, "goes on with 'Miaow'"),
    "range": (SINGS.replace("2-3", "3-4"), 3, "range 3-4: it must start with the next word, 2"),
    "range of one": (SINGS.replace("2-3", "2-2"), 3, "range 2-2"),
    "long range": (SINGS.replace("2-3", "2-9"), 3, "a range to word 9 of 6 words"),
    "two ranges": (SINGS.replace("3\tn't", "3-4\tx" + "\t_" * 8 + "\n3\tn't"), 5, "range 3-4"),
    "no words": (rows("1-2 du _ _"), 1, "a multiword token without its words"),
    "bytes": (DOGS.encode().replace(b"young", b"y\xf6ung"), 2, "not UTF-8 (byte 0xf6)"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_line_is_named(tmp_path, name):
    text, line, what = BROKEN[name]
    before = b"" if name == "bytes" else SINGS.encode() + b"\n"
    path = write(tmp_path, before + (text if isinstance(text, bytes) else text.encode()))
    with pytest.raises(DataError) as caught:
        read_conllu(path)
    assert f"{path}, line {line + before.count(NEWLINE)}: " in str(caught.value) and what in str(caught.value)


@pytest.mark.parametrize(
    "name, data, what",
    (
        ("a.conllu", b"", "has no sentences"),
        ("a.conllu", b"# only\n\n# comments\n", "has no sentences"),
        ("a.conllu.gz", TREEBANK.encode(), "is not a gzip file, or damaged"),
        ("a.conllu.gz", gzip.compress(TREEBANK.encode())[:-30], "is not a gzip file, or damaged"),
        ("a.conllu", None, "No such file"),
        (".", None, "is a folder"),
    ),
)
def test_a_file_without_sentences_is_refused(tmp_path, name, data, what):
    if data is not None:
        write(tmp_path, data, name)
    with pytest.raises(DataError) as caught:
        read_conllu(tmp_path / name)
    assert str(tmp_path) in str(caught.value) and what in str(caught.value)
