"""What the flags of the swap and of the compression say together."""

import pytest

from collab_heads.errors import ArgumentError
from collab_heads.training.options.changes import check_fit, check_smaller, check_swap, wants_swap
from collab_heads.training.options.heads import check_alphas, check_heads, check_rotation

CHECKS = (check_swap, check_fit, check_smaller, check_heads, check_alphas, check_rotation)


def check(args):
    for each in CHECKS:
        each(args)


@pytest.mark.parametrize(
    "flags, swaps",
    (
        ("", False),
        ("--collaborative --dim_value 0.5 --swap between", True),
        ("--collaborative --dim_value 16 --dim_shared_query_key 0.5 --swap after", True),
        ("--compress_budget 0.5", True),
        ("--compress_budget 1 --compress_of cache --compress_kind shared --swap after --sites enc-self", True),
        ("--compress_budget 0.5 --swap between --alpha_mixing", True),
    ),
)
def test_what_goes_together(flags, swaps, parse):
    args = parse(flags)
    check(args)
    assert wants_swap(args) is swaps


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--dim_value 0.5", "--dim_value needs --collaborative$"),
        ("--dim_value 0.5 --kind per_head", "--dim_value, --kind need --collaborative$"),
        ("--swap after", "--swap needs --collaborative or --compress_budget$"),
        ("--sites enc-self", "--sites needs --collaborative or --compress_budget$"),
        ("--compress_of cache", "--compress_of needs --compress_budget$"),
        ("--compress_kind shared", "--compress_kind needs --compress_budget"),
        ("--compress_budget 1.5", "budget 1.5 must be a share"),
        ("--compress_budget 0", "--compress_budget: 0 is too small"),
        ("--compress_budget 0.5 --collaborative", "--compress_budget and --collaborative exclude each other"),
        ("--compress_budget 0.5 --dim_shared_query_key 8", "--dim_shared_query_key needs --collaborative"),
        ("--compress_budget 0.5 --calibration_samples 0", "--compress_budget needs --calibration_samples"),
        ("--compress_budget 0.5 --compress_of size", "unknown --compress_of 'size'"),
        ("--compress_budget 0.5 --compress_kind none", "unknown --compress_kind 'none'"),
        ("--compress_budget 0.5 --compress_shape round", "unknown --compress_shape 'round'"),
        ("--compress_shape free", "--compress_shape needs --compress_budget"),
        ("--compress_budget 0.5 --target_heads 3", "--compress_budget and --target_heads exclude each other"),
        ("--compress_budget 0.5 --alpha_mixing --fold_heads", "cannot be --collaborative or compressed"),
        ("--compress_budget 0.5 --alpha_mixing --swap after", "cannot compress mixed heads"),
        ("--compress_budget 0.5 --rotate hard", "they cannot rotate"),
        ("--collaborative --dim_value 8 --swap after --target_heads 3", "--dim_value 8 with --swap after is the width"),
    ),
)
def test_what_does_not(flags, message, parse):
    with pytest.raises(ArgumentError, match=message):
        check(parse(flags))
