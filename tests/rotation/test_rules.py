"""A policy and a metric per role, pairs of layers that "soft" is limited to: by hand, and in models."""

import json
from collections import Counter

import pytest
from model_configs import bert_config
from unchanged import refused

from collab_heads.analysis.measures import passes
from collab_heads.errors import ArgumentError
from collab_heads.rotation.exchange import Slot
from collab_heads.rotation.rules import RoleSettings
from collab_heads.training import HeadRotation
from families import FAMILIES, make

TWO = {"enc-self": "soft", "dec-enc": "hard"}
STACK = [[Slot(f"layer{layer}", head) for head in range(4)] for layer in range(6)]
WEAKEST = {0: (3, 1), 1: (0, 2), 2: (1, 0), 3: (2, 3), 4: (0, 1), 5: (2, 0)}  # layer -> its two weakest heads, in order
SCORES = {
    slot: float(WEAKEST[i].index(slot.head)) if slot.head in WEAKEST[i] else 9.0
    for i, e in enumerate(STACK)
    for slot in e
}


def layers_and_heads(pairs) -> list:
    return [tuple((int(slot.path[-1]), slot.head) for slot in pair) for pair in pairs]


@pytest.mark.parametrize("count", (1, 2))
@pytest.mark.parametrize("layer_pairs", (1, 2, 3, None))
def test_soft_takes_so_many_pairs_of_layers_the_outermost_first(count, layer_pairs):
    """The source's --dynamic-max-switches: layer i with layer L - 1 - i, for i below it."""
    chosen = RoleSettings("soft", count=count, layer_pairs=layer_pairs).choose(STACK, SCORES, "")
    expected = [((i, WEAKEST[i][k]), (5 - i, WEAKEST[5 - i][k])) for i in range(layer_pairs or 3) for k in range(count)]
    assert layers_and_heads(chosen) == expected


def test_a_middle_layer_stays_whatever_the_limit():
    for limit in (2, None):
        chosen = RoleSettings("soft", layer_pairs=limit).choose(STACK[:5], SCORES, "")
        assert [(low, high) for (low, _), (high, _) in layers_and_heads(chosen)] == [(0, 4), (1, 3)]


def test_only_layers_that_take_part_need_heads():
    thin = [STACK[0], STACK[1][:1], STACK[2][:1], STACK[3]]
    RoleSettings("soft", count=2, layer_pairs=1).check_stack("enc-self", thin)
    with pytest.raises(ArgumentError, match="count 2 is more than half of the 1 enc-self heads of layer 1"):
        RoleSettings("soft", count=2).check_stack("enc-self", thin)
    with pytest.raises(ArgumentError, match="layer_pairs 3 is more than the 2 that the 4 enc-self layers make"):
        RoleSettings("soft", layer_pairs=3).check_stack("enc-self", thin)


def test_every_role_has_a_policy_and_a_metric_of_its_own():
    """What each plans is what a rotation of that role alone plans."""
    model, inputs = FAMILIES["marian"].build(), FAMILIES["marian"].inputs()
    both = HeadRotation(
        policy=TWO, metric={"enc-self": "confidence", "dec-enc": "pairwise"}, count={"enc-self": 2, "dec-enc": 1}
    )
    both.check(model, 3)
    alone = [
        HeadRotation(policy="soft", metric="confidence", roles="enc-self", count=2),
        HeadRotation(policy="hard", metric="pairwise", roles="dec-enc"),
    ]
    expected = [pair for rotation in alone for pair in rotation.plan(model, 1, [inputs])]
    assert len(expected) == 3
    assert both.plan(model, 1, [inputs]) == expected
    others = HeadRotation(
        policy=TWO, metric={"enc-self": "wasserstein", "dec-enc": "confidence"}, count={"enc-self": 2, "dec-enc": 1}
    )
    assert others.plan(model, 1, [inputs]) != expected  # the metrics matter
    both.apply(model, epoch=1, batches=[inputs])
    assert [entry["kind"] for entry in both.history] == ["swap"]
    kinds = Counter(end[0].split(".")[-1] for pair in both.history[0]["pairs"] for end in pair)
    assert kinds == {"self_attn": 4, "encoder_attn": 2}


def test_a_metric_for_all_and_random_without_one():
    rotation = HeadRotation(policy={"enc-self": "random", "dec-enc": "hard"}, metric={"dec-enc": "base"})
    assert rotation.role_settings["dec-enc"].metric == "base"
    same = HeadRotation(policy={"enc-self": "local", "dec-enc": "hard"}, metric="base").role_settings
    assert {role: (each.policy, each.metric) for role, each in same.items()} == {
        "enc-self": ("local", "base"),
        "dec-enc": ("hard", "base"),
    }
    model = FAMILIES["marian"].build()
    only_random = HeadRotation(policy={"enc-self": "random", "dec-self": "hard"}, start={"enc-self": 1, "dec-self": 2})
    assert len(only_random.plan(model, 1)) == 1  # nothing to rank yet: no batches are needed
    with pytest.raises(ArgumentError, match="the policy 'hard' ranks heads by confidence: it needs batches"):
        only_random.plan(model, 2)


def test_heads_are_measured_once_an_epoch(monkeypatch):
    """Also by two metrics: batches may be a stream."""
    model, inputs, passed = FAMILIES["marian"].build(), FAMILIES["marian"].inputs(), []
    stock = passes.run_batches

    def run_batches(*args):
        passed.append(args)
        return stock(*args)

    monkeypatch.setattr(passes, "run_batches", run_batches)
    rotation = HeadRotation(policy=TWO, metric={"enc-self": "output_distance", "dec-enc": "pairwise"})
    assert len(rotation.plan(model, 1, iter([inputs]))) == 2
    assert len(passed) == 1


def test_a_state_of_before_is_gone_on_from():
    """One policy for all is stored as it always was."""
    rotation = HeadRotation(policy="hard", metric="l2", count=2, end=4)
    cycles = {"all": {"count": 2, "frequency": 1, "rest": 1, "start": 1, "end": 4}}
    assert rotation.settings() == {"policy": "hard", "metric": "l2", "seed": 0, "cycles": cycles}
    several = HeadRotation(policy=TWO, layer_pairs={"enc-self": 1})
    state = json.loads(json.dumps(several.state_dict()))
    assert state["policy"] == TWO
    assert state["cycles"]["enc-self"]["layer_pairs"] == 1 and "layer_pairs" not in state["cycles"]["dec-enc"]
    HeadRotation(policy=TWO, layer_pairs={"enc-self": 1}).load_state_dict(state)
    for other in (
        HeadRotation(policy=TWO),
        HeadRotation(policy={**TWO, "dec-enc": "local"}, layer_pairs={"enc-self": 1}),
    ):
        with pytest.raises(ArgumentError, match="not the state of this rotation"):
            other.load_state_dict(state)


@pytest.mark.parametrize(
    "options, message",
    (
        ({"policy": {"enc-self": "softer"}}, "enc-self: unknown policy 'softer'.*did you mean 'soft'"),
        ({"policy": {"encoder": "soft"}}, "unknown role 'encoder'"),
        ({"policy": {}}, "policy is for no role"),
        ({"policy": TWO, "roles": "enc-self"}, "policy is for enc-self, dec-enc, the roles that rotate are enc-self"),
        ({"policy": {"enc-self": "soft"}, "roles": ["enc-self", "dec-self"]}, "policy is for enc-self, the roles"),
        (
            {"policy": TWO, "metric": {"enc-self": "base"}},
            "metric is for enc-self, the roles that rotate are enc-self,",
        ),
        (
            {"policy": TWO, "metric": {"dec-self": "base"}},
            "metric is for dec-self, the roles that rotate are enc-self,",
        ),
        ({"policy": TWO, "metric": {"enc-self": "base", "dec-enc": "b"}}, "dec-enc: unknown metric 'b'"),
        ({"policy": TWO, "layer_pairs": 1}, "dec-enc: layer_pairs is for the policy 'soft'.*not for 'hard': name"),
        ({"policy": TWO, "layer_pairs": {"dec-self": 1}}, "layer_pairs is for dec-self, the roles that rotate"),
        ({"policy": "hard", "layer_pairs": 1}, "layer_pairs is for the policy 'soft'"),
        ({"policy": "soft", "layer_pairs": 0}, "layer_pairs must be a whole number from 1, not 0"),
        ({"policy": "soft", "layer_pairs": {"enc-self": True}}, "layer_pairs must be a whole number from 1, not True"),
    ),
)
def test_settings_that_make_no_sense(options, message):
    with pytest.raises(ArgumentError, match=message):
        HeadRotation(**options)


def test_a_policy_for_a_role_that_the_model_does_not_have():
    model = make(FAMILIES["bert"].base, bert_config(num_hidden_layers=4))
    with refused(model, ArgumentError, "the model has no dec-enc attention; its roles: enc-self"):
        HeadRotation(policy=TWO).check(model)
    HeadRotation(policy={"enc-self": "soft"}, layer_pairs=2).check(model)
    with refused(model, ArgumentError, "layer_pairs 3 is more than the 2 that the 4 enc-self layers make"):
        HeadRotation(policy="soft", layer_pairs=3).check(model)
