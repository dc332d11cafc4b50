"""The flags about heads: what their values mean, what does not go together, and what a model cannot give."""

from argparse import ArgumentTypeError

import pytest

from collab_heads.errors import ArgumentError
from collab_heads.training.options import heads
from collab_heads.training.options.value_types import count, per_role

target = per_role(count)


def test_a_target_is_a_total_or_a_number_per_role():
    assert target("18") == 18
    assert target("0") == 0
    assert target("enc-self=4") == {"enc-self": 4}
    assert target("enc-self=4, dec-self=0,dec-enc=6") == {"enc-self": 4, "dec-self": 0, "dec-enc": 6}


@pytest.mark.parametrize(
    "text, message",
    (
        ("-1", "-1 is below 0"),
        ("enc-self=-1", "-1 is below 0"),
        ("enc-sefl=4", "'enc-sefl=4' is not one role=number of enc-self, dec-self, dec-enc"),
        ("enc-self=4,enc-self=5", "'enc-self=5' is not one role=number"),
        ("enc-self=4,", "'' is not one role=number"),
        ("enc-self=4,18", "'18' is not one role=number"),
        ("=4", "'=4' is not one role=number"),
    ),
)
def test_other_targets_are_refused_with_the_reason(text, message):
    with pytest.raises(ArgumentTypeError, match=message):
        target(text)


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--target_heads half", "argument --target_heads: invalid number, or role=number, value: 'half'"),
        ("--target_heads 2.5", "argument --target_heads: invalid number, or role=number, value: '2.5'"),
        ("--target_heads enc-self=x", "argument --target_heads: invalid number, or role=number, value: 'enc-self=x'"),
        ("--target_heads -3", "argument --target_heads: -3 is below 0"),
        ("--gate_weight -1", "argument --gate_weight: -1 must be a finite number, 0 or more"),
        ("--gate_weight nan", "argument --gate_weight: nan"),
        ("--gate_learning_rate 0", "argument --gate_learning_rate: 0 is too small"),
        ("--selection_share 0", "argument --selection_share: 0 is too small"),
        ("--importance_samples -1", "argument --importance_samples"),
        ("--target_head 3", r"unknown flag '--target_head' \(did you mean '--target_heads'\?\)"),
    ),
)
def test_wrong_values_are_refused(flags, message, parse):
    with pytest.raises(ArgumentError, match=message):
        parse(flags)


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--target_heads 3 --gate_weight 0.1", "--gate_weight and --target_heads exclude each other"),
        (
            "--target_heads 3 --head_selection random --alive_heads f",
            "--target_heads and --alive_heads exclude each other",
        ),
        ("--target_heads 3 --gate_weight 1 --alive_heads f", "exclude each other"),
        ("--head_selection gradient", "--head_selection needs --target_heads"),
        ("--head_selection random --gate_weight 1", "--head_selection needs --target_heads"),
        ("--head_selection random --alive_heads f", "--head_selection needs --target_heads"),
        ("--head_selection gradiant --target_heads 3", r"did you mean 'gradient'"),
        ("--gated_sites enc-self", "--gated_sites goes with --gate_weight or a total"),
        ("--gated_sites enc-self --alive_heads f", "--gated_sites goes with"),
        ("--gated_sites enc-self --target_heads enc-self=3", "--gated_sites goes with"),
        ("--selection_share 1.5", "--selection_share 1.5 is a share, 1 at most"),
        ("--target_heads 3 --num_train_epochs 0", "--num_train_epochs is 0 .* --head_selection gradient"),
        ("--gate_weight 1 --num_train_epochs 0", "--num_train_epochs is 0"),
        ("--target_heads 3 --max_train_steps 0", "--max_train_steps is 0"),
        (
            "--target_heads 3 --collaborative --swap after --dim_shared_query_key 16",
            "--dim_shared_query_key 16 with --swap after .* give a share",
        ),
        (
            "--target_heads 3 --collaborative --swap after --dim_value enc-self=0.5,dec-enc=16",
            "--dim_value 16 with --swap after .* give a share",
        ),
    ),
)
def test_flags_that_do_not_go_together_are_refused(flags, message, parse):
    with pytest.raises(ArgumentError, match=message):
        heads.check_heads(parse(flags))


@pytest.mark.parametrize(
    "flags, gates, learns",
    (
        ("", False, False),
        ("--num_train_epochs 0", False, False),
        ("--target_heads 3", True, True),
        ("--target_heads 0", True, True),
        ("--target_heads enc-self=0", True, True),
        ("--target_heads 3 --num_train_epochs 0 --max_train_steps 1", True, True),
        ("--target_heads 3 --gated_sites enc-self --selection_share 1", True, True),
        ("--target_heads 3 --head_selection gradient --num_train_epochs 0", True, False),
        ("--target_heads 3 --head_selection random", True, False),
        ("--gate_weight 0", True, True),
        ("--gate_weight 0.1 --gated_sites enc-self", True, True),
        ("--alive_heads f --num_train_epochs 0", True, False),
        ("--alive_heads f --target_heads 3", True, True),
        ("--alive_heads f --gate_weight 0.1 --gated_sites dec-enc", True, True),
        ("--target_heads 3 --collaborative --swap after --dim_shared_query_key 0.5", True, True),
        ("--collaborative --swap after --dim_shared_query_key 16", False, False),
    ),
)
def test_flags_that_go_together_are_taken(flags, gates, learns, parse):
    args = parse(flags)
    heads.check_heads(args)
    assert (heads.wants_gates(args), heads.learns_gates(args)) == (gates, learns)
