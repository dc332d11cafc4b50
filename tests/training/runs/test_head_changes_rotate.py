"""The rotation that the flags describe, and models and trainings that it does not fit."""

import json

import pytest
from unchanged import assert_unchanged, snapshot

from collab_heads import CollabHeadsError
from collab_heads.errors import ArgumentError, DataError
from collab_heads.training import HeadRotation
from collab_heads.training.options import heads
from collab_heads.training.runs import head_changes
from families import FAMILIES


def cycles(args) -> dict:
    """The cycles of a rotation as it stores them."""
    return head_changes.rotation_of(args).settings()["cycles"]


def test_without_flags_nothing_rotates(parse):
    args = parse("")
    heads.check_rotation(args)
    assert not heads.wants_rotation(args)
    assert head_changes.rotation_of(args) is None


def test_numbers_for_all_roles(parse):
    args = parse(
        "--rotate soft --rotation_metric l2 --rotation_count 2 --rotation_frequency 3 --rotation_rest 4 "
        "--rotation_start 5 --rotation_end 6 --seed 7"
    )
    heads.check_rotation(args)
    assert heads.wants_rotation(args)
    rotation = head_changes.rotation_of(args)
    assert (rotation.policy, rotation.metric, rotation.seed) == ("soft", "l2", 7)
    assert cycles(args) == {"all": {"count": 2, "frequency": 3, "rest": 4, "start": 5, "end": 6}}


def test_numbers_per_role(parse):
    args = parse("--rotate hard --rotation_count enc-self=2,dec-enc=3 --rotation_end enc-self=4,dec-enc=5")
    heads.check_rotation(args)
    assert args.rotation_count == {"enc-self": 2, "dec-enc": 3}
    assert json.loads(json.dumps(args.rotation_count)) == args.rotation_count  # as a checkpoint keeps it
    once = {"frequency": 1, "rest": 1, "start": 1}
    assert cycles(args) == {"enc-self": {"count": 2, "end": 4, **once}, "dec-enc": {"count": 3, "end": 5, **once}}


def test_a_policy_and_a_metric_per_role(parse):
    args = parse(
        "--rotate enc-self=soft,dec-enc=hard --rotation_metric enc-self=confidence,dec-enc=pairwise "
        "--rotation_layer_pairs enc-self=2 --rotation_count 2"
    )
    heads.check_rotation(args)
    found = head_changes.rotation_of(args).role_settings
    assert {role: (each.policy, each.metric, each.layer_pairs, each.count) for role, each in found.items()} == {
        "enc-self": ("soft", "confidence", 2, 2),
        "dec-enc": ("hard", "pairwise", None, 2),
    }
    assert json.loads(json.dumps(args.rotate)) == args.rotate == {"enc-self": "soft", "dec-enc": "hard"}


def test_what_is_left_out_is_as_in_the_library(parse):
    for policy in ("hard", "soft", "local", "random"):
        ours = head_changes.rotation_of(parse(f"--rotate {policy}"))
        assert ours.settings() == HeadRotation(policy=policy, seed=42).settings()  # 42: the scripts' own seed


def test_roles_that_rotate(parse):
    args = parse("--rotate random --rotation_sites dec-enc enc-self --rotation_start 2")
    heads.check_rotation(args)
    assert list(cycles(args)) == ["enc-self", "dec-enc"]


def test_a_schedule_is_read(parse, tmp_path):
    path = tmp_path / "rotation.json"
    path.write_text('{"3": [{"role": "enc-self", "layers": [0, 1], "heads": [0, 3]}]}')
    args = parse(f"--rotation_schedule {path}")
    heads.check_rotation(args)
    rotation = head_changes.rotation_of(args)
    assert list(rotation.schedule) == [3]


@pytest.mark.parametrize("content", (None, "{", "[]", "{}", '{"0": []}', '{"1": [], "1": []}', '{"1": [{"heads": 1}]}'))
def test_a_schedule_that_cannot_be_read(content, parse, tmp_path):
    path = tmp_path / "rotation.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=f"{path}: "):
        head_changes.rotation_of(parse(f"--rotation_schedule {path}"))


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--rotation_count 0", "count must be a whole number from 1, not 0"),
        ("--rotation_start 0", "start must be a whole number from 1, not 0"),
        ("--rotation_start 4 --rotation_end 3", "start 4 is after end 3"),
        ("--rotation_sites enc-sefl", r"unknown role 'enc-sefl' \(did you mean 'enc-self'\?\)"),
        ("--rotation_sites enc-self --rotation_count dec-enc=1", "count is for dec-enc, the roles that rotate are"),
        ("--rotation_count enc-self=1 --rotation_rest dec-enc=1", "rest is for dec-enc, the roles that rotate are"),
        ("--rotation_start enc-self=3 --rotation_end enc-self=2", "enc-self: start 3 is after end 2"),
    ),
)
def test_settings_that_cannot_be(flags, message, parse):
    args = parse(f"--rotate hard {flags}")
    heads.check_rotation(args)
    with pytest.raises(ArgumentError, match=message):
        head_changes.rotation_of(args)


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--rotation_count dec-enc=1", "the model has no dec-enc attention"),
        ("--rotation_count 5", "count 5 is more than half of the 8 enc-self heads"),
        ("--rotation_start 4", "start 4 is beyond the last epoch, 3"),
        ("--rotate enc-self=hard,dec-enc=soft", "the model has no dec-enc attention; its roles: enc-self"),
        ("--rotate soft --rotation_layer_pairs 2", "layer_pairs 2 is more than the 1 that the 2 enc-self layers make"),
        ("--rotation_end 4", "end 4 is beyond the last epoch, 3"),
    ),
)
def test_models_and_trainings_that_do_not_fit(flags, message, parse):
    model = FAMILIES["bert"].build()
    before = snapshot(model)
    rotation = head_changes.rotation_of(parse(f"--rotate hard {flags}"))
    with pytest.raises(CollabHeadsError, match=message):
        rotation.check(model, 3)
    assert_unchanged(model, before)
