"""The generated corpus of an invented language."""

from collab_heads.demo import corpus


def test_the_corpus_is_the_same_on_every_machine():
    english, invented = corpus(3, 0)
    assert (english, invented) == (corpus(5, 0)[0][:3], corpus(5, 0)[1][:3])
    assert english != corpus(3, 1)[0]
    assert english[0] == "the dog follows the quiet horse ."
    assert invented[0] == "li haru li dolon shio sheka ."
    many, there = corpus(2000, 0)
    assert len(set(many)) > 1900
    assert {line.split()[-1] for side in (many, there) for line in side} == {"."}
    assert any(" an old " in line for line in many)
    assert not any(" a old " in f" {line}" for line in many)
    pairs = [(line, other) for line, other in zip(many, there, strict=True) if " near " in line or " with " in line]
    assert len(pairs) > 500
    assert all("ul" in other.split() for _, other in pairs)
