"""The flags of the distillation say when there is nothing to learn."""

import pytest

from collab_heads.errors import ArgumentError
from collab_heads.training.options.changes import check_distillation


@pytest.mark.parametrize("flags", ("", "--collaborative --distill_steps 3", "--compress_budget 0.5 --distill_steps 3"))
def test_what_goes_together(flags, parse):
    check_distillation(parse(flags))


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--distill_steps 3", "--distill_steps needs --collaborative or --compress_budget"),
        ("--distill_steps 0 --collaborative", "--distill_steps: 0 is too small"),
        ("--distill_from there --collaborative", "--distill_from needs --distill_steps"),
        ("--collaborative --distill_steps 3 --score_terms content", "would learn what --score_terms leaves out"),
    ),
)
def test_what_does_not(flags, message, parse):
    with pytest.raises(ArgumentError, match=message):
        check_distillation(parse(flags))
