"""Positional heads: planted ones, with exact numbers."""

import pytest
import torch
from known_heads import SMALL, looking, show, site, text

from collab_heads.analysis.roles.labels import LEAST_TOKENS, HeadRoles, RoleThresholds, roles_from_measures
from collab_heads.analysis.roles.positional import Positional
from collab_heads.errors import CalibrationError, NonFiniteError

KINDS = ("positional", "first token")
IDS = [[2, 10, 11, 12, 3], [2, 10, 3, 0, 0]]


def before(length: int, offset: int = -1) -> list[int]:
    """Where a head looks that always looks at an offset, and at itself where it cannot."""
    return [t + offset if 0 <= t + offset < length else t for t in range(length)]


def test_shares_of_planted_heads():
    """A head that looks one back and one that looks at position 2; padding and [SEP] do not count."""
    positions = [[before(5), [2] * 5], [[0, 0, 1, 4, 4], [2, 2, 2, 0, 0]]]
    batch = (text(IDS, [5, 3]), {"one": looking(positions, 5)})
    seen = show(Positional(), [site()], [batch], exclude=[3])
    numbers = seen.results()["one"]
    # of 4 + 2 tokens, the two first cannot look back; head 1 looks at 2, 1, 0, -1 and 2, 1: one back only once
    assert numbers.tokens == 6 and numbers.share.dtype == torch.float64 and numbers.offset.dtype == torch.int64
    assert numbers.offset.tolist() == [-1, 1] and numbers.share.tolist() == [4 / 6, 2 / 6]
    assert seen.counts["one"].tolist()[1] == [0, 0, 0, 1, 1, 2, 2, 0, 0]  # offsets -4 to 4


def test_batches_of_any_length_give_the_same():
    positions = [[before(5), before(5, 2)], [[*before(3), 0, 0], [*before(3, 2), 1, 1]]]
    whole = show(Positional(), [site()], [(text(IDS, [5, 3]), {"one": looking(positions, 5)})])
    single = [
        (text([IDS[0]]), {"one": looking([positions[0]], 5)}),
        (text([IDS[1][:3]]), {"one": looking([[row[:3] for row in positions[1]]], 3)}),
    ]
    for batches in (single, single[::-1]):
        apart = show(Positional(), [site()], batches)
        assert torch.equal(apart.counts["one"], whole.counts["one"])
    assert whole.results()["one"].share.tolist() == [6 / 8, 4 / 8]


def test_padding_on_the_left_moves_nothing():
    right = show(Positional(), [site(heads=1)], [(text([IDS[0]], [4]), {"one": looking([[[0, 0, 1, 1, 1]]], 5)})])
    left = show(Positional(), [site(heads=1)], [(text([IDS[0]], [4], True), {"one": looking([[[0, 1, 1, 2, 2]]], 5)})])
    assert torch.equal(right.counts["one"], left.counts["one"]) and int(right.counts["one"].sum()) == 4


def test_ties_go_to_the_nearest_then_to_the_one_before():
    looks = [[[1, 0, 0, 2, 2], [1, 1, 1, 1, 4]]]  # +1 -1 -2 -1 -2; +1 0 -1 -2 0
    numbers = show(Positional(), [site()], [(text([IDS[0]]), {"one": looking(looks, 5)})]).results()["one"]
    assert numbers.offset.tolist() == [-1, 0]
    looks = [[[2, 2, 0, 4, 4], [1, 0, 2, 3, 4]]]  # +2 +1 -2 +1 0; +1 -1 0 0 0
    numbers = show(Positional(), [site()], [(text([IDS[0]]), {"one": looking(looks, 5)})]).results()["one"]
    assert numbers.offset.tolist() == [1, 0]
    looks = [[[1, 0, 2, 2, 3], [3, 4, 2, 0, 1]]]  # +1 -1 0 -1 -1; +3 +3 0 -3 -3
    numbers = show(Positional(), [site()], [(text([IDS[0]]), {"one": looking(looks, 5)})]).results()["one"]
    assert numbers.offset.tolist() == [-1, -3]


def test_labels_from_the_threshold_on():
    """Nine of ten tokens look one back: 0.9 is enough. A head that looks at itself is positional too."""
    looks = looking([[before(10), list(range(10)), [0] * 10]], 10)
    seen = show(Positional(), [site(heads=3)], [(text([list(range(2, 12))]), {"one": looks})])
    roles = roles_from_measures([site(heads=3)], {"one": (0, 1, 5)}, positional=seen, thresholds=SMALL)
    assert roles.labels == {"one": (("positional -1",), ("positional 0",), ("first token",))}
    ahead = show(Positional(), [site()], [(text([[2] * 10]), {"one": looking([[before(10, 1), before(10, 2)]], 10)})])
    roles = roles_from_measures([site()], {"one": (0, 1)}, positional=ahead, thresholds=SMALL)
    assert roles.labels == {"one": (("positional +1",), ())}


@pytest.mark.parametrize("left", (False, True))
def test_a_head_that_looks_at_the_first_token_is_not_positional(left):
    """Of three tokens, before or behind padding: one head looks at the first, one at the token before."""
    first = 2 if left else 0
    looks = [[[first] * 3, [first, first, first + 1]]]
    padded = [[[0, 0, *head] if left else [*head, 4, 4] for head in sentence] for sentence in looks]
    seen = show(Positional(), [site()], [(text([IDS[0]], [3], left), {"one": looking(padded, 5)})])
    numbers = seen.results()["one"]
    assert numbers.tokens == 3 and numbers.offset.tolist() == [0, -1] and numbers.share.tolist() == [1 / 3, 2 / 3]
    assert numbers.first_token.dtype == torch.float64 and numbers.first_token.tolist() == [1.0, 0.5]
    for least, labels in (
        (0.5, (("first token",), ())),  # no more often than the median head
        (0.6, (("first token",), ("positional -1",))),
    ):
        thresholds = RoleThresholds(positional=0.3, first_token=least, samples=SMALL.samples)
        roles = roles_from_measures([site()], {"one": (0, 1)}, positional=seen, thresholds=thresholds)
        assert roles.labels == {"one": labels}
    assert numbers.first_chance == pytest.approx(1 / 3)
    assert "first token (1.00, median head 0.50, chance 0.33)" in str(roles) and "1 positional, 1 first token" in str(
        roles
    )
    assert roles.to_dict()["positional"]["one"]["first_token"] == [1.0, 0.5]


def on_first(shares: list[float], role: str = "enc-self", tokens: int = 11) -> HeadRoles:
    """The roles of heads that look at the first of some tokens for a share of the others, and else at themselves."""
    looks = [[[0 if t <= share * (tokens - 1) else t for t in range(tokens)] for share in shares]]
    where = [site(heads=len(shares), role=role)]
    seen = show(Positional(), where, [(text([[2] * tokens]), {"one": looking(looks, tokens)})])
    return roles_from_measures(where, {"one": tuple(range(len(shares)))}, positional=seen, thresholds=SMALL)


@pytest.mark.parametrize(
    ("shares", "labelled", "habit"),
    (
        ([0.5, 0.1, 0.1, 0.2], [0], False),
        ([1.0, 0.9, 0.8, 0.9, 0.7], [], True),  # all rest there
        ([1.0, 0.5, 0.6, 0.6, 0.7], [0], True),  # one does far more often than the others
        ([1.0, 1.0, 0.3, 0.3, 0.4], [0, 1], False),
        ([0.4, 0.1, 0.1], [], False),
        ([0.9], [], True),  # nothing to compare a lone head with
    ),
)
def test_the_role_of_looking_at_the_first_token_is_relative_to_the_model(shares, labelled, habit):
    roles = on_first(shares)
    numbers = roles.positional["one"]
    assert numbers.first_token.tolist() == pytest.approx(shares) and numbers.first_chance == pytest.approx(1 / 11)
    assert [head for head, labels in enumerate(roles.labels["one"]) if "first token" in labels] == labelled
    resting = sum(share >= 0.5 for share in shares)
    said = f"{resting} of {len(shares)} heads of enc-self look most at the first token"
    assert (said in "".join(roles.habits())) == (said in str(roles)) == habit == bool(roles.habits())


def test_the_role_of_looking_at_the_first_token_is_relative_to_chance():
    """A decoder's second token has two to look at: in a text of three, more than 0.4 of any head's looks fall there."""
    roles = on_first([0.5, 0.0, 0.0], "dec-self", 3)
    assert roles.positional["one"].first_chance == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert roles.positional["one"].first_token.tolist() == [0.5, 0, 0] and "first token" not in str(roles.labels)
    assert "first token" in str(on_first([1.0, 0.0, 0.0], "dec-self", 3).labels)


@pytest.mark.parametrize("missing", (0, 1))
def test_a_small_sample_gets_a_warning_instead(missing):
    tokens = LEAST_TOKENS - missing
    looks = looking([[before(tokens), [0] * tokens]], tokens)
    seen = show(Positional(), [site()], [(text([[2] * tokens]), {"one": looks})])
    roles = roles_from_measures([site()], {"one": (0, 1)}, positional=seen)
    assert roles.labels == {"one": ((), ()) if missing else (("positional -1",), ("first token",))}
    said = [f"1 head would be called {kind!r}, but 99 query tokens are too few to tell: it takes 100" for kind in KINDS]
    assert list(roles.warnings) == (said if missing else [])


def test_lone_tokens_look_at_no_first_one():
    seen = show(Positional(), [site()], [(text([IDS[0]], [1]), {"one": looking([[[0] * 5, [0] * 5]], 5)})])
    assert seen.results()["one"].first_token.tolist() == [0.0, 0.0]


def test_a_module_of_several_layers_counts_them_all():
    weights = looking([[before(5), before(5, 1)]], 5), looking([[before(5, 1), before(5, 1)]], 5)
    seen = show(Positional(), [site()], [(text([IDS[0]]), {"one": each}) for each in weights])
    numbers = seen.results()["one"]
    assert numbers.tokens == 10 and numbers.share.tolist() == [4 / 10, 8 / 10]


def test_self_attention_only():
    sites = [site("a", "enc-self"), site("b", "dec-self"), site("c", "dec-enc")]
    weights = {each.path: looking([[before(5), before(5)]], 5) for each in sites}
    assert show(Positional(), sites, [(text([IDS[0]]), weights)]).results().keys() == {"a", "b"}
    assert show(Positional(("enc-self",)), sites, [(text([IDS[0]]), weights)]).results().keys() == {"a"}


def test_no_token_and_nan_are_refused():
    batch = (text([IDS[0]]), {"one": looking([[before(5), before(5)]], 5)})
    with pytest.raises(CalibrationError, match="one saw no query token"):
        show(Positional(), [site()], [batch], exclude=range(20)).results()
    with pytest.raises(CalibrationError, match="one saw no query token"):
        show(Positional(), [site()], []).results()
    weights = looking([[before(5), before(5)]], 5)
    weights[0, 1, 3] = float("nan")
    with pytest.raises(NonFiniteError, match="one: attention weights are NaN"):
        show(Positional(), [site()], [(text([IDS[0]]), {"one": weights})]).results()
    show(Positional(), [site()], [(text([IDS[0]], [3]), {"one": weights})]).results()  # in padding it does not matter
