"""Sentences of Python's documentation, and queries that are none of them."""

from collab_heads.demo import documentation


def test_sentences_are_prose():
    texts, _ = documentation()
    assert len(texts) == 512 and len(set(texts)) > 500
    assert all(text[0].isupper() and ">>>" not in text and "\n" not in text for text in texts)
    assert sum(text.endswith(".") for text in texts) == 512 and sum(map(len, texts)) / 512 > 60


def test_queries_and_passages_are_other_paragraphs():
    texts, queries = documentation()
    assert len(queries) == 256 and all(each.keys() == {"query", "passage"} for each in queries)
    seen = set(texts)
    assert not seen & {text for each in queries for text in each.values()}
    assert len({each["query"] for each in queries}) == 256


def test_it_is_the_same_every_time():
    assert documentation() == documentation()
