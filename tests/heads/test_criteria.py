"""Criteria: what they need is asked for, and their arguments are checked, before anything is measured."""

import pytest
import torch

from collab_heads import get_adapter, prune_heads
from collab_heads.analysis import head_importance
from collab_heads.errors import ArgumentError
from collab_heads.heads.criteria import Random
from families import FAMILIES


def test_random_scores_need_no_batches():
    model = FAMILIES["bert"].build()
    scores = head_importance(model, criterion=Random(seed=1))
    again = head_importance(model, criterion=Random(seed=1))
    other = head_importance(model, criterion="random")
    assert scores.keys() == {site.path for site in get_adapter(model).sites(model)}
    assert all(torch.equal(scores[path], again[path]) for path in scores)
    assert not any(torch.equal(scores[path], other[path]) for path in scores)


@pytest.mark.parametrize("criterion", ("gradient", "reconstruction"))
@pytest.mark.parametrize("call", (head_importance, lambda *args, **more: prune_heads(*args, keep=3, **more)))
def test_others_need_them(criterion, call):
    with pytest.raises(ArgumentError, match=f"criterion '{criterion}' ranks heads by what they do: pass batches"):
        call(FAMILIES["bert"].build(), criterion=criterion)


@pytest.mark.parametrize("seed", ("a", -1, 1.5, None, True))
def test_a_seed_that_cannot_be(seed):
    with pytest.raises(ArgumentError, match="seed must be a whole number"):
        Random(seed=seed)
