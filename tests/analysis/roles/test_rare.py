"""Rare-token heads: planted ones, with exact numbers."""

import pytest
import torch
from known_heads import SMALL, looking, show, site, text
from model_sizes import VOCABULARY

from collab_heads.analysis.roles.labels import LEAST_SENTENCES, roles_from_measures
from collab_heads.analysis.roles.rare import RareTokens, count_tokens
from collab_heads.errors import ArgumentError, CalibrationError
from families import FAMILIES

# id:                    0  1  2  3  4  5  6  7  8
COUNTS = torch.tensor([0, 0, 1, 1, 9, 5, 5, 3, 8])
IDS = [[2, 4, 7, 5, 6, 3], [2, 8, 4, 3, 0, 0]]  # rarest 7, then 5 and 6; rarest 8, then 4
ENDS = (2, 3)


def seen(positions, *, ids=IDS, lengths=(6, 4), counts=COUNTS, special=ENDS, exclude=(), **more):
    observer = RareTokens(counts, special, **more)
    batch = (text(ids, list(lengths)), {"one": looking(positions, len(ids[0]))})
    return show(observer, [site(heads=len(positions[0]), role=observer.role)], [batch], exclude=exclude)


def test_shares_of_planted_heads():
    """The rarest, one of the second rarest, and what is rarer and no candidate: special tokens and padding."""
    numbers = seen([[[2] * 6, [3, 4] * 3, [0] * 6, [5] * 6], [[1] * 6, [2] * 6, [3] * 6, [0] * 6]]).results()["one"]
    assert numbers.tokens == 10 and numbers.rarest.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert numbers.two_rarest.tolist() == [1.0, 1.0, 0.0, 0.0] and numbers.rarest.dtype == torch.float64
    # of 6 tokens 1 is the rarest and 3 are one of the two rarest (a tie); of 4 tokens 1 and 2
    assert numbers.chance == pytest.approx(((6 / 6 + 4 / 4) / 10, (6 * 3 / 6 + 4 * 2 / 4) / 10), abs=1e-15)


def test_excluded_tokens_do_not_count_as_queries():
    numbers = seen([[[2, 2, 2, 1, 1, 1]], [[1, 2, 1, 2, 2, 2]]], exclude=[3]).results()["one"]
    assert numbers.tokens == 8 and numbers.rarest.tolist() == [5 / 8] and numbers.two_rarest.tolist() == [6 / 8]


def test_equally_rare_tokens_count_alike():
    """5 and 6 are the rarest of this sentence, whichever the head looks at, and the two rarest."""
    numbers = seen([[[1, 3, 1, 3, 2]]], ids=[[2, 5, 4, 6, 3]], lengths=[5]).results()["one"]
    assert numbers.rarest.tolist() == numbers.two_rarest.tolist() == [4 / 5] and numbers.chance == (0.4, 0.4)


def test_sentences_with_one_candidate_and_without_any():
    numbers = seen([[[1, 1, 1, 0]], [[0, 1, 2, 3]]], ids=[[2, 4, 3, 3], [2, 3, 2, 3]], lengths=[4, 4]).results()["one"]
    assert numbers.rarest.tolist() == numbers.two_rarest.tolist() == [3 / 8] and numbers.chance == (1 / 8, 1 / 8)


def test_padding_is_never_the_rarest():
    """Whatever stands there, and were a head to look at it."""
    numbers = seen([[[3] * 4, [1] * 4]], ids=[[2, 4, 3, 7]], lengths=[3]).results()["one"]
    assert (
        numbers.tokens == 3 and numbers.two_rarest.tolist() == [0.0, 1.0] and numbers.chance[0] == pytest.approx(1 / 3)
    )


def test_batches_of_any_length_give_the_same():
    positions = [[[2] * 6, [3, 4] * 3], [[1, 2, 1, 2, 0, 0], [2, 2, 0, 1, 0, 0]]]
    whole, observer = seen(positions), RareTokens(COUNTS, ENDS)
    single = [
        (text([IDS[0]]), {"one": looking([positions[0]], 6)}),
        (text([IDS[1][:4]]), {"one": looking([[row[:4] for row in positions[1]]], 4)}),
    ]
    apart, whole = show(observer, [site()], single).results()["one"], whole.results()["one"]
    assert torch.equal(apart.rarest, whole.rarest) and whole.rarest.tolist() == [8 / 10, 1 / 10]
    assert torch.equal(apart.two_rarest, whole.two_rarest) and apart.chance == pytest.approx(whole.chance, abs=1e-15)


def test_every_layer_of_every_batch_sees_its_own_tokens():
    """What is prepared for a batch is made once, and anew for the next."""
    sites, observer = [site("a", heads=1), site("b", layer=1, heads=1)], RareTokens(COUNTS, ENDS)
    weights = {path: looking([[[2] * 4]], 4) for path in "ab"}
    found = show(observer, sites, [(text([[2, 4, 7, 3]]), weights), (text([[2, 7, 4, 3]]), weights)]).results()
    assert [found[path].rarest.tolist() for path in "ab"] == [[0.5], [0.5]]


def test_a_decoder_knows_what_it_has_read():
    """Causal: the rarest of the tokens so far; padding is on the left."""
    positions = [[[0, 0, 2, 3, 3, 3], [2, 2, 2, 2, 2, 2]]]
    observer = RareTokens(COUNTS, (), role="dec-self")
    batch = (text([[0, 0, 4, 5, 7, 4]], [4], left=True), {"one": looking(positions, 6)})
    numbers = show(observer, [site(role="dec-self")], [batch]).results()["one"]
    # the rarest so far, from position 2 on: 4, 5, 7, 7 (at 2, 3, 4, 4); the two rarest: {4}, {4 5}, {5 7}, {5 7}
    assert numbers.tokens == 4 and numbers.rarest.tolist() == [2 / 4, 1 / 4]
    assert numbers.two_rarest.tolist() == [4 / 4, 2 / 4]
    assert numbers.chance == pytest.approx(((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4, (1 + 1 + 2 / 3 + 2 / 4) / 4), abs=1e-15)


def test_labels_in_the_first_layer_only():
    sites = [site("a", heads=2), site("b", layer=1, heads=2)]
    weights = looking([[[2, 2, 1, 1], [2, 1, 1, 1]]], 4)
    observer = show(RareTokens(COUNTS, ENDS), sites, [(text([[2, 4, 7, 3]]), {"a": weights, "b": weights})])
    roles = roles_from_measures(sites, {"a": (0, 1), "b": (0, 1)}, rare=observer, thresholds=SMALL)
    assert roles.labels == {"a": (("rare tokens",), ()), "b": ((), ())}  # 0.5 is enough
    assert roles.rare["b"].rarest.tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    "sentences, common, why",
    (
        (LEAST_SENTENCES, 9, None),
        (1, 9, "1 sentence is too few to tell: it takes 30"),
        (LEAST_SENTENCES - 1, 9, "29 sentences are too few to tell: it takes 30"),
        (LEAST_SENTENCES, 1, "would reach 0.50, as so many tokens are equally rare"),
    ),
)
def test_a_small_sample_gets_a_warning_instead(sentences, common, why):
    """A head that always finds the rarest of two words; or both are, and any head would find one half of the time."""
    counts = torch.tensor([0, 0, 1, 1, common, 1])
    batch = (text([[2, 4, 5, 3]] * sentences), {"one": looking([[[2] * 4, [0] * 4]] * sentences, 4)})
    seen = show(RareTokens(counts, ENDS), [site()], [batch])
    roles = roles_from_measures([site()], {"one": (0, 1)}, rare=seen)
    assert roles.rare["one"].sentences == sentences and roles.rare["one"].rarest.tolist() == [1.0, 0.0]
    assert roles.labels == {"one": ((() if why else ("rare tokens",)), ())}
    assert len(roles.warnings) == bool(why)
    if why:
        assert (
            f"1 head would be called 'rare tokens', but {'a head that looks anywhere ' if common == 1 else ''}{why}"
            in str(roles)
        )


def test_token_counts():
    model = FAMILIES["bert"].build()
    batches = [text(IDS, [6, 4]), text([[7, 7, 1]], [2]), {"input_ids": torch.tensor([[8, 8]])}]
    counts = count_tokens(model, batches)
    assert counts.shape == (VOCABULARY,) and counts.dtype == torch.int64
    assert counts[:9].tolist() == [0, 0, 2, 2, 2, 1, 1, 3, 3] and int(counts.sum()) == 14
    choices = {"input_ids": torch.tensor([IDS]), "attention_mask": batches[0]["attention_mask"][None]}
    assert torch.equal(count_tokens(model, [choices]), count_tokens(model, batches[:1]))
    assert count_tokens(model, [{"inputs_embeds": torch.zeros(1, 2, 32)}]) is None


def test_counts_take_batches_that_can_be_read_again():
    with pytest.raises(ArgumentError, match=r"batches is a generator that can be read only once.*token_counts"):
        count_tokens(FAMILIES["bert"].build(), (each for each in [text(IDS)]))
    with pytest.raises(CalibrationError, match="empty"):
        count_tokens(FAMILIES["bert"].build(), [])
    with pytest.raises(CalibrationError, match=r"batch 0 holds the id 61"):
        count_tokens(FAMILIES["bert"].build(), [{"input_ids": torch.tensor([[61]])}])
    with pytest.raises(CalibrationError, match=r"batch 0: the mask \(1, 3\) does not fit the ids \(1, 2\)"):
        wrong = {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 3)}
        count_tokens(FAMILIES["bert"].build(), [wrong])


@pytest.mark.parametrize(
    "counts, what",
    (
        ([1, 2], "found list"),
        (torch.ones(2, 2), r"found \(2, 2\)"),
        (torch.ones(0), r"found \(0,\)"),
        (torch.tensor([1.0, float("nan")]), "negative or not finite"),
        (torch.tensor([1, -1]), "negative or not finite"),
    ),
)
def test_counts_that_are_none(counts, what):
    with pytest.raises(ArgumentError, match=f"token_counts: .*{what}"):
        RareTokens(counts)


def test_other_counts_and_ids():
    """Shares of a corpus do as well; an id beyond the counts is refused; without ids there is nothing to say."""
    numbers = seen([[[2] * 6], [[1] * 6]], counts=COUNTS / 7).results()["one"]
    assert numbers.rarest.tolist() == [1.0]
    with pytest.raises(ArgumentError, match="token_counts has 7 numbers, but batch 0 holds the id 8"):
        seen([[[2] * 6], [[1] * 6]], counts=COUNTS[:7])
    batch = ({"inputs_embeds": torch.zeros(1, 4, 32)}, {"one": looking([[[0] * 4, [0] * 4]], 4)})
    assert show(RareTokens(COUNTS), [site()], [batch]).results() == {}
    with pytest.raises(CalibrationError, match="b saw no query token"):
        observer = RareTokens(COUNTS)
        show(observer, [site("a"), site("b")], [])
        observer.tokens["a"] = 1
        observer.results()
