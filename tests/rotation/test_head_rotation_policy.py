"""Dynamic rotation: policies by hand on given scores, the cycle by hand, resuming, what it refuses."""

import json
from collections import Counter

import pytest
import torch
from changed_heads import change_queries
from model_configs import bert_config
from model_sizes import HEADS
from unchanged import assert_unchanged, refused, snapshot

from collab_heads import get_adapter, prune_heads, rotate_heads, swap_to_gated
from collab_heads.analysis.measures.head_scores import head_scores
from collab_heads.analysis.measures.results import mean_distance
from collab_heads.base.option_values import METRIC_WORDS
from collab_heads.errors import ArgumentError, ModelStateError, NonFiniteError, UnsupportedModelError
from collab_heads.rotation import rules
from collab_heads.rotation.exchange import Slot
from collab_heads.training import HeadRotation
from families import FAMILIES, make

BERT = "encoder.layer.{}.attention.self"
ROLES = {"enc-self": "encoder.layers.{}.self_attn", "dec-self": "decoder.layers.{}.self_attn"}
ROLES["dec-enc"] = "decoder.layers.{}.encoder_attn"
POLICIES = ("hard", "soft", "local", "random")
SETTINGS = ("count", "frequency", "rest", "start", "end")
SCORES = (  # of four layers: every layer has another order, and layers differ in strength
    (0.41, 0.42, 0.44, 0.43),
    (0.12, 0.94, 0.13, 0.11),
    (0.35, 0.31, 0.33, 0.99),
    (0.25, 0.92, 0.21, 0.24),
)


def bert(layers=4):
    return make(FAMILIES["bert"].base, bert_config(num_hidden_layers=layers))


def marian():
    return FAMILIES["marian"].build()


@pytest.fixture
def measured(monkeypatch):
    """Give scores instead of measuring: role or path pattern -> scores by layer; what was asked for is noted."""
    asked = []

    def give(scores, l2=None):
        def head_scores(model, batches, metrics, *, exclude):
            asked.append((list(batches), tuple(metrics)))
            assert exclude is None
            given = {"l2": l2, "pairwise": l2, "confidence": scores}
            sites = get_adapter(model).sites_with_heads(model)
            return {
                metric: {s.path: torch.tensor(given[metric][s.layer], dtype=torch.float64) for s in sites}
                for metric in metrics
            }

        monkeypatch.setattr(rules, "head_scores", head_scores)
        return asked

    return give


def numbers(pairs) -> list:
    """Pairs as ((layer, head), (layer, head))."""
    return [tuple((int(slot.path.split(".")[2]), slot.head) for slot in pair) for pair in pairs]


def weights(model) -> dict:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(first: dict, second: dict) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


# ---- policies, by hand


def test_hard_takes_the_best_and_the_worst_of_the_stack(measured):
    measured(SCORES)
    plan = HeadRotation(policy="hard", count=3).plan(bert(), 1, [{}])
    assert numbers(plan) == [((2, 3), (1, 3)), ((1, 1), (1, 0)), ((3, 1), (1, 2))]


def test_soft_ranks_each_layer_by_itself(measured):
    """Layer 0 with 3, 1 with 2: the weak heads of the one with the weak heads of the other, not of the same number."""
    measured(SCORES)
    plan = HeadRotation(policy="soft", count=2).plan(bert(), 1, [{}])
    assert numbers(plan) == [((0, 0), (3, 2)), ((0, 1), (3, 3)), ((1, 3), (2, 1)), ((1, 0), (2, 2))]


def test_soft_leaves_a_middle_layer_alone(measured):
    measured(SCORES[:3])
    assert numbers(HeadRotation(policy="soft").plan(bert(3), 1, [{}])) == [((0, 0), (2, 1))]


def test_local_stays_in_its_layer(measured):
    measured(SCORES)
    plan = numbers(HeadRotation(policy="local", count=2).plan(bert(), 1, [{}]))
    assert plan[:4] == [((0, 0), (0, 2)), ((0, 1), (0, 3)), ((1, 3), (1, 1)), ((1, 0), (1, 2))]
    assert plan[4:] == [((2, 1), (2, 3)), ((2, 2), (2, 0)), ((3, 2), (3, 1)), ((3, 3), (3, 0))]


def test_random_pairs_share_no_head():
    model, drawn = bert(), []
    for seed in (0, 1):
        for epoch in (1, 3):
            rotation = HeadRotation(policy="random", count=8, seed=seed)
            plan = rotation.plan(model, epoch)
            assert plan == HeadRotation(policy="random", count=8, seed=seed).plan(model, epoch)
            places = [place for pair in numbers(plan) for place in pair]
            assert sorted(places) == [(layer, head) for layer in range(4) for head in range(HEADS)]
            drawn.append(tuple(plan))
    assert len(set(drawn)) == 4
    plan = numbers(HeadRotation(policy="random", count=2, seed=1).plan(model, 1))
    assert len({place for pair in plan for place in pair}) == 4


def test_random_roles_draw_by_themselves():
    plan = HeadRotation(policy="random", count=4).plan(marian(), 1)
    parts = [numbers(plan[start : start + 4]) for start in (0, 4, 8)]
    assert parts[0] != parts[1] != parts[2] != parts[0]


def test_l2_is_the_mean_distance_to_the_other_heads(measured):
    """The diagonal does not count, whatever stands there; confidence would choose others."""
    distances = torch.tensor([[9.0, 1, 2, 3], [1, 9, 6, 5], [2, 6, 9, 4], [3, 5, 4, 9]])  # means 2, 4, 4, 4
    distances[3, 1] = distances[1, 3] = 8.0  # 2, 5, 4, 5
    means = mean_distance(distances)
    assert means.tolist() == [2.0, 5.0, 4.0, 5.0]
    asked = measured([(1.0, 2.0, 3.0, 4.0)] * 2, l2=[means.tolist(), (10 * means).tolist()])
    assert numbers(HeadRotation(policy="hard", metric="l2").plan(bert(2), 1, [{}])) == [((1, 3), (0, 0))]
    assert asked == [([{}], ("l2",))]
    assert mean_distance(torch.zeros(1, 1)).tolist() == [0.0]


def test_equal_scores_make_disjoint_pairs(measured):
    measured([(0.5,) * HEADS] * 4)
    for policy in ("hard", "local", "soft"):
        count = 8 if policy == "hard" else 2
        places = Counter(
            place for pair in HeadRotation(policy=policy, count=count).plan(bert(), 1, [{}]) for place in pair
        )
        assert set(places.values()) == {1}


def test_twelve_layers_are_not_mixed_up(measured):
    """Layer 1 pairs with 10, 2 with 9: numbers, not strings."""
    measured([(0.1 * layer, 1.0, 1.0, 1.0) for layer in range(12)])
    plan = numbers(HeadRotation(policy="soft").plan(bert(12), 1, [{}]))
    assert [(low, high) for (low, _), (high, _) in plan] == [(0, 11), (1, 10), (2, 9), (3, 8), (4, 7), (5, 6)]
    assert numbers(HeadRotation(policy="hard", count=2).plan(bert(12), 1, [{}]))[0][1] == (0, 0)


def test_every_role_is_a_stack_of_its_own(measured):
    measured(SCORES[:2])
    plan = HeadRotation(policy="hard").plan(marian(), 1, [{}])
    assert [[slot.path.rsplit(".", 3)[0] for slot in pair] for pair in plan] == [
        ["encoder"] * 2,
        *[["decoder"] * 2] * 2,
    ]
    best, worst = (1, 1), (1, 3)
    assert numbers(plan) == [(best, worst)] * 3
    assert [pair[0].path for pair in plan] == [path.format(1) for path in ROLES.values()]
    only = HeadRotation(policy="hard", roles=["dec-enc"]).plan(marian(), 1, [{}])
    assert only == plan[2:]


def test_removed_heads_do_not_take_part(measured):
    """Places keep their original numbers, and scores are those of the heads that are left."""
    model = bert(2)
    prune_heads(model, heads={"enc-self": [[1], [0, 2]]})
    measured([(0.3, 0.9, 0.5), (0.1, 0.7)])
    assert numbers(HeadRotation(policy="hard", count=2).plan(model, 1, [{}])) == [((0, 2), (1, 1)), ((1, 3), (0, 0))]
    rotation = HeadRotation(policy="local")
    before = weights(model)
    assert numbers(rotation.apply(model, epoch=1, batches=[{}])) == [((0, 0), (0, 2)), ((1, 1), (1, 3))]
    assert not same(before, weights(model))
    rotation.apply(model, epoch=2)
    assert same(before, weights(model))


# ---- the cycle, by hand


def kinds(rotation, model, epochs) -> str:
    """What happened before epochs 1, 2, ...: s for a swap, b for back, B for both, a dot for nothing."""
    found = []
    for epoch in range(1, epochs + 1):
        rotation.apply(model, epoch=epoch, batches=[{}])
        own = {entry["kind"][0] for entry in rotation.history if entry["epoch"] == epoch}
        found.append("B" if len(own) == 2 else own.pop() if own else ".")
    return "".join(found)


@pytest.mark.parametrize(
    "settings, expected",
    (
        ({}, "sbsbsbsbsb"),
        ({"start": 3}, "..sbsbsbsb"),
        ({"frequency": 3}, "s..bs..bs."),
        ({"rest": 2}, "sb.sb.sb.s"),
        ({"start": 2, "frequency": 2, "rest": 3}, ".s.b..s.b."),
        ({"end": 4}, "sbsb......"),
        ({"end": 3}, "sbsb......"),
        ({"start": 2, "frequency": 4, "end": 3}, ".s.b......"),
        ({"start": 4, "end": 4}, "...sb....."),
        ({"frequency": 3, "end": 9}, "s..bs..bsb"),
    ),
)
@pytest.mark.parametrize("policy", ("random", "soft"))
def test_the_cycle(settings, expected, policy, measured):
    measured(SCORES[:2])
    model = bert(2)
    before = weights(model)
    rotation = HeadRotation(policy=policy, **settings)
    assert kinds(rotation, model, 10) == expected
    assert same(weights(model), before) == (expected.rstrip(".")[-1] == "b")


def test_between_swap_and_back_the_heads_are_elsewhere(measured):
    """By hand: swapped heads train in other places, and take what they learned back with them."""
    measured(SCORES[:2])
    model, by_hand = bert(2), bert(2)
    rotation = HeadRotation(policy="soft", count=2, frequency=2)
    first = rotation.apply(model, epoch=1, batches=[{}])
    assert len(first) == 2
    for made in (model, by_hand):
        if made is by_hand:
            rotate_heads(by_hand, first)
        for p in made.parameters():
            p.data.mul_(1.5)
    assert same(weights(model), weights(by_hand))
    assert rotation.apply(model, epoch=2, batches=[{}]) == []
    assert rotation.apply(model, epoch=3, batches=[{}]) == first[::-1]
    rotate_heads(by_hand, first[::-1])
    assert same(weights(model), weights(by_hand))
    pairs = [[[slot.path, slot.head] for slot in pair] for pair in first]
    assert rotation.history == [
        {"epoch": 1, "kind": "swap", "pairs": pairs},
        {"epoch": 3, "kind": "back", "pairs": pairs[::-1]},
    ]


def test_roles_have_cycles_of_their_own(measured):
    measured(SCORES[:2])
    rotation = HeadRotation(
        policy="hard", count={"enc-self": 1, "dec-enc": 2}, start={"enc-self": 1, "dec-enc": 2}, frequency=1, rest=2
    )
    model = marian()
    before = weights(model)
    assert kinds(rotation, model, 6) == "sBbsBb"
    found = [(e["epoch"], e["kind"], len(e["pairs"]), e["pairs"][0][0][0].split(".")[-1]) for e in rotation.history]
    assert found[:4] == [
        (1, "swap", 1, "self_attn"),
        (2, "back", 1, "self_attn"),
        (2, "swap", 2, "encoder_attn"),
        (3, "back", 2, "encoder_attn"),
    ]
    assert same(weights(model), before)
    assert not any("decoder.layers.0.self_attn" in str(entry) for entry in rotation.history)


def test_heads_are_only_measured_for_a_swap(measured):
    asked = measured(SCORES[:2])
    rotation, model = HeadRotation(policy="soft", frequency=2, start=2), bert(2)
    for epoch in range(1, 5):
        rotation.apply(model, epoch=epoch, batches=iter([{"epoch": epoch}]))
    assert asked == [([{"epoch": 2}], ("confidence",))]
    for epoch in (1, 2):
        HeadRotation(policy="random", start=2).apply(bert(2), epoch=epoch)
    assert len(asked) == 1
    with refused(model, ArgumentError, "'soft' ranks heads by confidence: it needs batches"):
        rotation.apply(model, epoch=5)


def test_moments_follow_there_and_back():
    model = bert(2)
    optimizer = torch.optim.AdamW(model.parameters())
    for index, p in enumerate(model.parameters()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(index))
    optimizer.step()
    before = [{k: v.clone() for k, v in state.items()} for state in optimizer.state.values()]
    rotation = HeadRotation(policy="random", count=4)

    def moved():
        return sum(not same(old, new) for old, new in zip(before, optimizer.state.values(), strict=True))

    rotation.apply(model, epoch=1, optimizer=optimizer)
    assert moved() == 2 * 3 * 2
    rotation.apply(model, epoch=2, optimizer=optimizer)
    assert moved() == 0


# ---- resuming


@pytest.mark.parametrize("stop", range(1, 8))
def test_it_resumes_where_it_was(stop, measured):
    """Also between a swap and its way back: another ranking by then does not matter, the pairs are those swapped."""
    measured(SCORES[:2])
    options = {"count": {"enc-self": 2, "dec-enc": 1}, "start": {"enc-self": 1, "dec-enc": 3}, "frequency": 3, "end": 6}
    unbroken, model = marian(), marian()
    whole, first = HeadRotation(policy="hard", **options), HeadRotation(policy="hard", **options)
    for epoch in range(1, stop + 1):
        whole.apply(unbroken, epoch=epoch, batches=[{}])
        first.apply(model, epoch=epoch, batches=[{}])
    state = json.loads(json.dumps(first.state_dict()))
    second = HeadRotation(policy="hard", **options)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert second.apply(model, epoch=stop, batches=[{}]) == []  # in the middle of the epoch
    for epoch in range(stop + 1, 9):
        measured(SCORES[2:] if epoch > stop + 1 else SCORES[:2])
        assert second.apply(model, epoch=epoch, batches=[{}]) == whole.apply(unbroken, epoch=epoch, batches=[{}])
        assert same(weights(model), weights(unbroken))
    assert second.state_dict() == whole.state_dict()
    assert len(second.history) == 6
    assert same(weights(model), weights(marian()))


def test_a_state_of_something_else(measured):
    measured(SCORES[:2])
    rotation, model = HeadRotation(policy="hard", frequency=3), bert(2)
    rotation.apply(model, epoch=1, batches=[{}])
    good = rotation.state_dict()
    for state, message in (
        (HeadRotation(policy="soft", frequency=3).state_dict(), "policy 'soft', not 'hard'"),
        (HeadRotation(policy="hard", metric="l2", frequency=3).state_dict(), "metric 'l2', not 'confidence'"),
        (HeadRotation(policy="hard", frequency=2).state_dict(), "cycles"),
        (HeadRotation(policy="hard", frequency=3, seed=1).state_dict(), "seed 1, not 0"),
        ({}, "not the state of a rotation"),
        ({k: v for k, v in good.items() if k != "swapped"}, "swapped"),
        ({**good, "swapped": {"encoder": {}}}, "unknown role in swapped 'encoder'"),
        ({**good, "swapped": {"enc-self": {"since": 1}}}, "swapped"),
        ({**good, "swapped": {"enc-self": {"since": 1, "pairs": [[[["a"], 0], ["b", 1]]]}}}, "places that are none"),
        ({**good, "swapped": {"enc-self": {"since": 0, "pairs": []}}}, "since must be a whole number"),
    ):
        with refused(model, ArgumentError, message):
            rotation.load_state_dict(state)
        assert rotation.state_dict() == good


# ---- several processes


def test_the_plan_of_another_rank(measured):
    asked = measured(SCORES[:2])
    model, other = bert(2), bert(2)
    main, rank = HeadRotation(policy="hard", count=2), HeadRotation(policy="hard", count=2)
    for epoch in (1, 2, 3):
        pairs = main.plan(other, epoch, [{}])
        assert main.apply(other, epoch=epoch, pairs=pairs) == rank.apply(model, epoch=epoch, pairs=pairs) == pairs
        assert same(weights(model), weights(other))
    assert len(asked) == 2 and main.state_dict() == rank.state_dict()


def test_pairs_that_are_not_due(measured):
    measured(SCORES[:2])
    model, rotation = marian(), HeadRotation(policy="hard", roles=["enc-self"], start=2)
    pair = (Slot(ROLES["enc-self"].format(0), 0), Slot(ROLES["enc-self"].format(1), 0))
    cross = (Slot(ROLES["dec-enc"].format(0), 0), Slot(ROLES["dec-enc"].format(1), 0))
    with refused(model, ArgumentError, "nothing of enc-self is due at epoch 1"):
        rotation.apply(model, epoch=1, pairs=[pair])
    with refused(model, ArgumentError, "nothing of dec-enc is due at epoch 2"):
        rotation.apply(model, epoch=2, pairs=[pair, cross])
    with refused(model, ArgumentError, "nothing of this path is due"):
        rotation.apply(model, epoch=2, pairs=[(Slot("x", 0), pair[1])])
    with refused(model, ArgumentError, "pairs of enc-self are not what is due before epoch 2: swap"):
        rotation.apply(model, epoch=2, pairs=[])
    assert rotation.history == []
    rotation.apply(model, epoch=2, pairs=[pair])
    with refused(model, ArgumentError, "not what is due before epoch 3: back"):
        rotation.apply(model, epoch=3, pairs=[pair[::-1]])
    rotation.apply(model, epoch=3, pairs=[pair])
    assert same(weights(model), weights(marian()))


# ---- what is refused


def test_counts_above_half_of_the_heads(measured):
    measured(SCORES)
    model = bert()
    for policy, most, where in (("hard", 8, "all 4 layers"), ("random", 8, "all 4 layers"), ("soft", 2, "layer 0")):
        HeadRotation(policy=policy, count=most).check(model)
        assert HeadRotation(policy=policy, count=most).plan(model, 1, [{}])
        rotation = HeadRotation(policy=policy, count=most + 1)
        for call in (lambda r: r.check(model), lambda r: r.apply(model, epoch=1, batches=[{}])):
            with refused(model, ArgumentError, f"count {most + 1} is more than half", where, policy, f"up to {most}"):
                call(rotation)
        assert rotation.history == []
    prune_heads(model, heads={BERT.format(2): [0, 1, 2]})
    HeadRotation(policy="hard", count=6).check(model)
    with refused(model, ArgumentError, "half of the 13"):
        HeadRotation(policy="hard", count=7).check(model)
    for policy in ("local", "soft"):
        with refused(model, ArgumentError, "half of the 1 enc-self heads of layer 2"):
            HeadRotation(policy=policy).check(model)
    three = bert(3)
    prune_heads(three, heads={BERT.format(1): [0, 1, 2]})
    HeadRotation(policy="soft", count=2).check(three)  # the middle layer stays as it is


def test_one_site_has_no_other_layer(measured):
    model = FAMILIES["albert"].build()
    with refused(model, ArgumentError, "'soft' pairs layers", "one site", "'local'"):
        HeadRotation(policy="soft").check(model)
    measured([(0.4, 0.1, 0.2, 0.3)])
    path = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    expected = [(Slot(path, 1), Slot(path, 0)), (Slot(path, 2), Slot(path, 3))]
    assert HeadRotation(policy="local", count=2).plan(model, 1, [{}]) == expected
    HeadRotation(policy="hard", count=2).check(model)


def test_epochs_beyond_the_last():
    model = bert(2)
    before = snapshot(model)
    HeadRotation(policy="hard", start=3, end=5).check(model, 5)
    HeadRotation(policy="hard", start=3, end=5).check(model)
    HeadRotation(policy="hard", start={"enc-self": 5}).check(model, 5)
    assert_unchanged(model, before)
    with refused(model, ArgumentError, "end 5 is beyond the last epoch, 4"):
        HeadRotation(policy="hard", start=3, end=5).check(model, 4)
    with refused(model, ArgumentError, "start 3 is beyond the last epoch, 2"):
        HeadRotation(policy="hard", start=3).check(model, 2)
    with refused(model, ArgumentError, "epochs must be a whole number", "2.0"):
        HeadRotation(policy="hard").check(model, 2.0)
    rotation = HeadRotation(policy="random")
    rotation.apply(model, epoch=3)
    with refused(model, ArgumentError, "epoch 2 comes after epoch 3"):
        rotation.apply(model, epoch=2)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("value", (0, -1, True, 1.0, "1", [1], float("nan")))
def test_settings_are_whole_numbers(name, value):
    for given in (value, {"enc-self": value}):
        with pytest.raises(ArgumentError, match=f"{name} must be a whole number from 1, not "):
            HeadRotation(policy="hard", **{name: given})


def test_none_is_no_number():
    for name in SETTINGS[:-1]:
        with pytest.raises(ArgumentError, match=f"{name} must be a whole number"):
            HeadRotation(policy="hard", **{name: None})
    assert HeadRotation(policy="hard", end={"enc-self": None}).role_settings["enc-self"].end is None


@pytest.mark.parametrize(
    "options, message",
    (
        ({"policy": "harder"}, "unknown policy 'harder'.*did you mean 'hard'.*soft"),
        ({"policy": None}, "a schedule, or a policy"),
        ({"policy": 3}, "policy must be one of hard, "),
        ({"schedule": {1: [{"paths": ["a", "b"], "heads": [0, 0]}]}}, "a schedule, or a policy"),
        ({"metric": "cosine"}, "unknown metric 'cosine'; known: confidence, output_distance, map_distance, base"),
        ({"roles": "encoder"}, "unknown role 'encoder'"),
        ({"roles": []}, "roles is empty"),
        ({"roles": 3}, "roles must be a text"),
        ({"count": {"enc-cross": 1}}, "unknown role 'enc-cross'"),
        ({"count": {}}, "count is for no role"),
        (
            {"count": {"enc-self": 1}, "start": {"dec-self": 1}},
            "start is for dec-self, the roles that rotate are enc-self",
        ),
        ({"roles": ["enc-self", "dec-self"], "count": {"enc-self": 1}}, "count is for enc-self, the roles that rotate"),
        ({"start": 4, "end": 3}, "start 4 is after end 3"),
        ({"start": {"enc-self": 4}, "end": 3}, "enc-self: start 4 is after end 3"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"seed": True}, "seed must be a whole number"),
    ),
)
def test_settings_that_make_no_sense(options, message):
    with pytest.raises(ArgumentError, match=message):
        HeadRotation(**{"policy": "hard", **options})


def test_models_that_cannot_rotate(measured):
    model = bert(2)
    for rotation in (HeadRotation(policy="hard", roles="dec-enc"), HeadRotation(policy="hard", count={"dec-enc": 1})):
        for call in (rotation.check, lambda model, rotation=rotation: rotation.plan(model, 1, [{}])):
            with refused(model, ArgumentError, "the model has no dec-enc attention; its roles: enc-self"):
                call(model)
    wrapped = torch.nn.DataParallel(model)
    with refused(wrapped, UnsupportedModelError, "pass .module"):
        HeadRotation(policy="hard").check(wrapped)
    swap_to_gated(model, sites=BERT.format(1))
    with refused(model, ModelStateError, "gates.log_alpha"):
        HeadRotation(policy="hard").check(model)
    HeadRotation(policy="local").check(model)
    model = bert(2)
    change_queries(model, "shared", None)
    for policy in POLICIES:
        with refused(model, ModelStateError, "collaborative"):
            HeadRotation(policy=policy).check(model)


def test_scores_must_be_numbers(measured):
    model, rotation = bert(2), HeadRotation(policy="hard")
    measured([(0.1, 0.2, float("nan"), 0.3)] * 2)
    with refused(model, NonFiniteError, BERT.format(0)):
        rotation.apply(model, epoch=1, batches=[{}])
    measured([(0.1, 0.2, 0.3)] * 2)
    with refused(model, ArgumentError, BERT.format(0), "4 heads"):
        rotation.apply(model, epoch=1, batches=[{}])
    assert rotation.history == [] and rotation.state_dict()["epoch"] == 0


# ---- with what heads really do


@pytest.mark.parametrize("family", ("bert", "marian", "t5", "distilbert", "albert"))
@pytest.mark.parametrize("metric", METRIC_WORDS)
def test_heads_are_measured(family, metric):
    """The plan is that of the measured scores; measuring changes nothing."""
    model, inputs = FAMILIES[family].build(), FAMILIES[family].inputs()
    before = snapshot(model)
    scores = rules.slot_scores(model, [inputs], get_adapter(model), [metric])[metric]
    roles = {site.path: site.role for site in get_adapter(model).sites(model)}
    plan = HeadRotation(policy="hard", metric=metric).plan(model, 1, [inputs])
    assert_unchanged(model, before)
    expected = []
    for role in dict.fromkeys(sorted(roles.values(), key=list(ROLES).index)):
        own = {slot: score for slot, score in scores.items() if roles[slot.path] == role}
        assert len(own) == HEADS * list(roles.values()).count(role)
        if metric == "base" and role == "dec-self":
            assert set(own.values()) == {1.0}  # see `base`
        else:
            assert len(set(own.values())) > len(own) // 2  # few keys leave "wasserstein" some ties
        ranked = sorted(own, key=own.get)  # of equal ones the earlier place is weaker
        expected.append((ranked[-1], ranked[0]))
    assert plan == expected


def test_names_say_what_is_compared():
    """The old name and the source's are the same measures as the names that say it; outputs and maps rank otherwise."""
    model, inputs = FAMILIES["marian"].build(), FAMILIES["marian"].inputs()
    adapter = get_adapter(model)
    scores = rules.slot_scores(model, [inputs], adapter, METRIC_WORDS)
    assert scores["l2"] == scores["output_distance"] and scores["pairwise"] == scores["map_distance"]
    different = ("confidence", "output_distance", "map_distance", "base", "wasserstein")
    orders = {metric: tuple(sorted(scores[metric], key=scores[metric].get)) for metric in different}
    assert len(set(orders.values())) == len(different)
    maps = head_scores(model, [inputs], ["map_distance"])["map_distance"]
    for slot, score in scores["pairwise"].items():
        assert score == pytest.approx(float(maps[slot.path][slot.head]), rel=1e-6)


def test_tokens_that_do_not_count(monkeypatch):
    """What `exclude` names is left out of the ranking."""
    model, inputs = FAMILIES["bert"].build(), FAMILIES["bert"].inputs()
    stock, seen = rules.head_scores, []

    def head_scores(*args, **options):
        seen.append(options["exclude"])
        return stock(*args, **options)

    monkeypatch.setattr(rules, "head_scores", head_scores)
    ends = [int(inputs["input_ids"][0, -1])]
    HeadRotation(policy="hard", exclude=ends).plan(model, 1, [inputs])
    assert seen == [ends]
