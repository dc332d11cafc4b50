"""Targets: what can be asked for, the choice of the best heads, and the way from all heads to the target."""

from itertools import pairwise

import pytest
import torch

from collab_heads.errors import ArgumentError
from collab_heads.heads.selection import check_target, choose, on_the_way

ROLES = ("enc-self",) * 6 + ("dec-self",) * 4 + ("dec-enc",) * 2
MEMBERS = {"enc-self": range(6), "dec-self": range(6, 10), "dec-enc": range(10, 12)}
PER_ROLE = {"enc-self": 3, "dec-self": 0, "dec-enc": 2}


def members(chosen) -> dict[str, int]:
    return {role: sum(bool(chosen[i]) for i in indices) for role, indices in MEMBERS.items()}


@pytest.mark.parametrize("target", (3, 12, PER_ROLE, {"enc-self": 0, "dec-self": 0, "dec-enc": 0}))
def test_targets_that_can_be(target):
    check_target(target, ROLES)


@pytest.mark.parametrize(
    "target, message",
    (
        (-1, r"target_heads is -1, must be a whole number from 0 to the 12 heads that exist"),
        (13, r"target_heads is 13, .* the 12 heads"),
        (True, r"target_heads is True"),
        (6.0, r"target_heads is 6\.0"),
        ("6", r"target_heads is '6'"),
        (None, r"target_heads is None"),
        (2, r"target_heads 2 would empty a role: .* 3 roles \(enc-self, dec-self, dec-enc\).* a number per role"),
        (0, r"target_heads 0 would empty a role"),
        ({**PER_ROLE, "dec-enc": 3}, r"target_heads\['dec-enc'\] is 3, .* the 2 dec-enc heads"),
        ({**PER_ROLE, "dec-enc": -1}, r"target_heads\['dec-enc'\] is -1"),
        ({**PER_ROLE, "enc-self": True}, r"target_heads\['enc-self'\] is True"),
        ({**PER_ROLE, "enc-self": 1.0}, r"target_heads\['enc-self'\] is 1\.0"),
        ({"enc-self": 3}, r"no number for the gated heads of dec-self, dec-enc"),
        ({}, r"no number for the gated heads of enc-self, dec-self, dec-enc"),
        ({**PER_ROLE, "enc-sefl": 1}, r"unknown role in target_heads 'enc-sefl' \(did you mean 'enc-self'\?\)"),
    ),
)
def test_targets_that_cannot_be(target, message):
    with pytest.raises(ArgumentError, match=message):
        check_target(target, ROLES)


def test_a_role_that_the_model_lacks_is_refused():
    with pytest.raises(ArgumentError, match="unknown role in target_heads 'dec-enc'; known: enc-self"):
        check_target({"enc-self": 1, "dec-enc": 1}, ("enc-self",) * 4)


def kinds_of_scores():
    """Random, all equal, and such that every best head is of one role."""
    generator = torch.Generator().manual_seed(0)
    yield from torch.randn(20, 12, generator=generator)
    yield torch.zeros(12)
    yield torch.arange(12.0)
    yield -torch.arange(12.0)
    yield torch.tensor([0.0, 1.0] * 6)


@pytest.mark.parametrize("target", range(3, 13))
def test_a_total_is_exact_and_empties_no_role(target):
    for scores in kinds_of_scores():
        chosen = choose(scores, ROLES, target)
        assert int(chosen.sum()) == target
        assert min(members(chosen).values()) >= 1


def test_a_total_keeps_the_best_of_every_role_and_then_the_best_of_all():
    scores = torch.tensor([9.0, 8, 7, 6, 5, 4, -1, -2, -3, -4, -9, -8])
    assert choose(scores, ROLES, 3).nonzero().flatten().tolist() == [0, 6, 11]
    assert choose(scores, ROLES, 5).nonzero().flatten().tolist() == [0, 1, 2, 6, 11]
    assert choose(scores, ROLES, 10).nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 11]


@pytest.mark.parametrize("target", (PER_ROLE, {"enc-self": 1, "dec-self": 4, "dec-enc": 0}))
def test_numbers_per_role_are_kept_to_the_letter(target):
    for scores in kinds_of_scores():
        chosen = choose(scores, ROLES, target)
        assert members(chosen) == target
        for indices in MEMBERS.values():
            inside = [float(scores[i]) for i in indices if chosen[i]]
            outside = [float(scores[i]) for i in indices if not chosen[i]]
            assert not (inside and outside) or min(inside) >= max(outside)


def test_roles_need_not_be_in_a_row():
    """Decoders have self and cross-attention in turns."""
    scores, roles = torch.tensor([1.0, 5, 3, 2]), ("dec-self", "dec-enc", "dec-self", "dec-enc")
    assert choose(scores, roles, {"dec-self": 1, "dec-enc": 1}).tolist() == [False, True, True, False]
    assert choose(scores, roles, 2).tolist() == [False, True, True, False]


@pytest.mark.parametrize("target", (3, 7, 12, PER_ROLE))
@pytest.mark.parametrize("steps", (1, 3, 7, 100))
def test_the_number_falls_from_all_to_the_target(target, steps):
    whole = {role: len(indices) for role, indices in MEMBERS.items()}
    way = [on_the_way(target, ROLES, step / steps) for step in range(steps + 1)]
    assert way[0] == (whole if isinstance(target, dict) else 12)
    assert way[-1] == target
    assert on_the_way(target, ROLES, 2.0) == target  # after the schedule
    per_role = isinstance(target, dict)
    for role, start, end in [(role, whole[role], target[role]) for role in whole] if per_role else [(None, 12, target)]:
        numbers = [one[role] if per_role else one for one in way]
        assert all(type(number) is int for number in numbers)
        assert all(before >= after >= end for before, after in pairwise(numbers))
        assert max(before - after for before, after in pairwise(numbers)) <= -(-(start - end) // steps)  # evenly
