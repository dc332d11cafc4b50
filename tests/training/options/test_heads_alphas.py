"""Alphas, disagreement and folding as the flags describe them."""

import json

import pytest

from collab_heads.errors import ArgumentError
from collab_heads.training.options import heads


def test_weights_per_role(parse):
    args = parse("--alpha_mixing --alpha_growth_weight enc-self=40,dec-enc=20.5 --disagreement_weight 0.1")
    assert args.alpha_growth_weight == {"enc-self": 40.0, "dec-enc": 20.5}
    assert args.disagreement_weight == 0.1
    assert json.loads(json.dumps(args.alpha_growth_weight)) == args.alpha_growth_weight  # as a checkpoint keeps it


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--alpha_start 1", "1 is a share of the steps, below 1"),
        ("--alpha_start late", "invalid share value: 'late'"),
        ("--alpha_start -0.1", "must be a finite number, 0 or more"),
        ("--alpha_growth_weight enc=1", "'enc=1' is not one role=number of enc-self, dec-self, dec-enc"),
        ("--alpha_growth_weight enc-self=1,enc-self=2", "'enc-self=2' is not one role=number"),
        ("--alpha_growth_weight enc-self=-1", "must be a finite number"),
        ("--alpha_growth_radius 0", "too small"),
        ("--disagreement_weight nan", "must be a finite number"),
    ),
)
def test_values_are_refused(parse, flags, message):
    with pytest.raises(ArgumentError, match=message):
        parse(flags)


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--alpha_start 0.3 --alpha_sites enc-self", "--alpha_sites, --alpha_start need --alpha_mixing"),
        ("--alpha_growth_weight 40", "--alpha_growth_weight needs --alpha_mixing"),
        ("--alpha_mixing --alpha_growth_radius 1e-3", "--alpha_growth_radius needs --alpha_growth_weight"),
        ("--alpha_mixing --alpha_growth_beside sum", "--alpha_growth_beside needs --alpha_growth_weight"),
        ("--alpha_mixing --alpha_growth_weight 40 --alpha_growth_beside tokens", "unknown --alpha_growth_beside 'tok"),
        ("--alpha_mixing --max_train_steps 0", "--alpha_mixing acts in training"),
        ("--disagreement_weight 1 --num_train_epochs 0", "--disagreement_weight acts in training"),
        ("--alpha_mixing --fold_heads --collaborative", "cannot be --collaborative"),
        ("--fold_heads", "--fold_heads needs --alpha_mixing, --target_heads, --gate_weight or --alive_heads$"),
        ("--save_head_statistics", "--save_head_statistics needs --output_dir"),
    ),
)
def test_flags_that_do_not_go_together(parse, flags, message):
    with pytest.raises(ArgumentError, match=message):
        heads.check_alphas(parse(flags))


@pytest.mark.parametrize("flags", ("", "--alpha_mixing --alpha_start 0", "--gate_weight 1 --fold_heads"))
def test_flags_that_go_together(parse, flags):
    heads.check_alphas(parse(flags))
