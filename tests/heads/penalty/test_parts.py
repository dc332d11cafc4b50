"""A part of a penalty is one class in one table; no part touches the model before all are made."""

from typing import ClassVar, get_args

import pytest
import torch
from unchanged import refused

from collab_heads import CollabHeadsError, swap_to_gated
from collab_heads.errors import ArgumentError
from collab_heads.heads.penalty import head_penalty
from collab_heads.heads.penalty.alphas import BESIDE
from collab_heads.heads.penalty.parts import LossKind, PenaltyPart
from collab_heads.training import HeadPenalty
from families import FAMILIES


class Counting(PenaltyPart):
    """Adds 3 to every loss, and counts what it is asked to do."""

    name: ClassVar[str] = "counting"
    skips_with_optimizer: ClassVar[bool] = True

    def __init__(self, model):
        self.weight, self.steps, self.attached, self.closed = next(model.parameters()), 0, False, False

    @classmethod
    def from_options(cls, model, adapter, options):
        return None if options.seed == 7 else cls(model)

    def attach(self):
        self.attached = True

    @property
    def finished(self):
        return self.steps >= 2

    def parameters(self):
        return [self.weight]

    def group(self, rates):
        return {"params": self.parameters(), "lr": rates.gates}

    def total(self, batch=None, tokens=None):
        return torch.tensor(3.0)

    def before_step(self):
        self.weight.grad = None

    def step(self):
        self.steps += 1

    def metrics(self):
        return {"steps": self.steps}

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

    def close(self):
        self.closed = True


@pytest.fixture
def model():
    model = FAMILIES["bert"].build()
    swap_to_gated(model)
    return model


def test_a_new_part_is_one_class_in_the_table(model, monkeypatch):
    monkeypatch.setattr(head_penalty, "PARTS", (*head_penalty.PARTS, Counting))
    penalty = HeadPenalty(model, gate_weight=0.0)
    part, weight = penalty.parts["counting"], next(model.parameters())
    assert list(penalty.parts) == ["gates", "counting"] and part.attached and not penalty.finished
    assert float(penalty.total()) == 3.0
    assert [group["lr"] for group in penalty.groups(gate_lr=0.5)] == [0.5, 0.5]
    assert id(weight) not in map(id, penalty.others(model))
    weight.grad = torch.ones_like(weight)
    penalty.before_step()
    assert weight.grad is None
    penalty.step()
    penalty.step(skipped=True)
    assert (part.steps, penalty.parts["gates"].done) == (1, 2)
    assert penalty.metrics()["steps"] == 1
    state = penalty.state_dict()
    penalty.step()
    assert penalty.finished
    penalty.load_state_dict(state)
    assert part.steps == 1
    penalty.close()
    assert part.closed
    assert list(HeadPenalty(model, gate_weight=0.0, seed=7).parts) == ["gates"]


@pytest.mark.parametrize("wrong", ({"disagreement": -1.0}, {"growth": 1.0}))
def test_a_wrong_part_leaves_the_model_to_no_other(model, wrong):
    """Gates would have become a subset, for good, in the config that is saved."""
    with refused(model, CollabHeadsError):
        HeadPenalty(model, target_heads=2, steps=2, **wrong)
    assert model.config.collab_heads["sites"]["encoder.layer.0.attention.self"]["gates"]["kind"] == "learned"


def test_the_names_of_parts_are_distinct_and_states_are_those_of_their_parts(model):
    assert [part.name for part in head_penalty.PARTS] == ["alphas", "gates", "disagreement"]
    penalty = HeadPenalty(model, gate_weight=0.0, disagreement=1.0)
    with pytest.raises(ArgumentError, match="it is for gates, not gates, disagreement"):
        penalty.load_state_dict({"gates": penalty.state_dict()["gates"]})


def test_the_types_name_what_runs():
    assert get_args(LossKind) == BESIDE == ("mean", "sum")
