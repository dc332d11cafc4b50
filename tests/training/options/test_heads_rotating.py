"""The flags about rotation: what their values mean, what does not go together, and what a model cannot give."""

import pytest

from collab_heads.errors import ArgumentError
from collab_heads.training.options import heads


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--rotate hard --rotation_count -1", "argument --rotation_count: -1 is below 0"),
        ("--rotate hard --rotation_count 1.5", "invalid number, or role=number, value: '1.5'"),
        ("--rotate hard --rotation_rest enc=1", "'enc=1' is not one role=number of enc-self, dec-self, dec-enc"),
        ("--rotate hard --rotation_start enc-self=1,enc-self=2", "'enc-self=2' is not one role=number"),
        ("--rotate", "argument --rotate: expected one argument"),
        ("--rotate encoder=soft", "'encoder=soft' is not one role=policy of enc-self, dec-self, dec-enc"),
        ("--rotate hard --rotation_metric enc-self=l2,enc-self=base", "is not one role=name of enc-self"),
        ("--rotate soft --rotation_layer_pairs enc-self=x", "argument --rotation_layer_pairs: invalid number"),
        ("--rotation hard", "unknown flag '--rotation'"),
    ),
)
def test_wrong_values_are_refused(flags, message, parse):
    with pytest.raises(ArgumentError, match=message):
        parse(flags)


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--rotation_count 2 --rotation_sites enc-self", "--rotation_count, --rotation_sites need --rotate"),
        ("--rotation_metric l2", "--rotation_metric needs --rotate"),
        ("--rotation_schedule f --rotation_end 3", "--rotation_end needs --rotate"),
        ("--rotate hard --rotation_schedule f", "exclude each other"),
        ("--rotate hart", r"unknown --rotate 'hart' \(did you mean 'hard'\?\)"),
        ("--rotate enc-self=soft,dec-enc=hart", r"unknown --rotate 'hart' \(did you mean 'hard'\?\)"),
        ("--rotate hard --rotation_metric enc-self=l2,dec-enc=l3", "unknown --rotation_metric 'l3'"),
        (
            "--rotate hard --rotation_metric l3",
            "unknown --rotation_metric 'l3'; known: confidence, output_di",
        ),
        ("--rotate hard --num_train_epochs 0", "there are no training steps"),
        ("--rotation_schedule f --max_train_steps 0", "there are no training steps"),
        ("--rotate hard --collaborative", "they cannot rotate"),
        ("--rotation_schedule f --collaborative --swap after", "they cannot rotate"),
        ("--rotate hard --alpha_mixing --target_heads 3", "leave one of"),
        ("--rotation_schedule f --alpha_mixing --gate_weight 0.1", "leave one of"),
    ),
)
def test_flags_that_do_not_go_together(flags, message, parse):
    with pytest.raises(ArgumentError, match=message):
        heads.check_rotation(parse(flags))


@pytest.mark.parametrize(
    "flags",
    (
        "--rotate hard --alpha_mixing",
        "--rotate local --target_heads 3",
        "--rotate random --rotation_metric l2 --disagreement_weight 1",
        "--rotate hard --rotation_metric pairwise",
        "--rotate enc-self=soft,dec-enc=hard --rotation_metric enc-self=base,dec-enc=wasserstein",
        "--rotate soft --rotation_layer_pairs 2",
        "--rotate hard --rotation_metric output_distance",
        "--rotate soft --alpha_mixing --target_heads 3 --head_selection gradient",  # they are gone by then
    ),
)
def test_flags_that_go_together(flags, parse):
    heads.check_rotation(parse(flags))
