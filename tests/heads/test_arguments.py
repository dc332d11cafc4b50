"""Every public call checks its arguments before it changes anything: whatever is passed, a refusal leaves no trace."""

import inspect
import math

import pytest
import torch
from changed_heads import gate, mix
from model_inputs import batch
from unchanged import assert_unchanged, snapshot

from collab_heads import (
    CollabHeadsError,
    prune_heads,
    rotate_heads,
    swap_to_alpha,
    swap_to_collaborative,
    swap_to_gated,
)
from collab_heads.analysis import head_importance, most_important
from collab_heads.training import HeadPenalty, HeadRotation
from families import FAMILIES

HUGE = 10**400  # no float holds it
ODD = (None, True, -1, 0, 1.5, -0.5, math.nan, math.inf, 2**32, 2**70, HUGE, "x", "", b"x", [], {}, [[]], [None])
ODD += ({"enc-self": HUGE}, {"enc-self": None}, {"enc-self": "x"}, {"x": 1}, {None: 1}, {1: [{}]}, object())
ODD += (torch.ones(3), [math.nan, math.nan], (-0.1, HUGE), {"enc-self": [[HUGE], []]}, {"enc-self": math.nan})
WORST = (2**70, HUGE, "x", {"enc-self": None})  # all of them take a minute
SITE = "encoder.layer.0.attention.self"


def stock():
    return FAMILIES["bert"].build()


def gated():
    model = stock()
    gate(model, empty=False)
    return model


def mixed():
    model = gated()
    mix(model)
    return model


def scores():
    return {path: torch.arange(4.0) for path in (SITE, SITE.replace("0", "1"))}


def labelled():
    return [batch() | {"labels": torch.tensor([0, 1, 0])}]


def rotate(model, **settings):
    rotation = HeadRotation(**settings)
    rotation.check(model, 4)
    rotation.apply(model, epoch=1, batches=labelled())


def groups(model, **rates):
    torch.optim.AdamW(HeadPenalty(model, gate_weight=0.1).groups(**rates), lr=0.1)


# Name -> the call, a model for it, and arguments with which it works.
CALLS = {
    "penalty of gates": (HeadPenalty, gated, {"gate_weight": 0.1}),
    "penalty with a target": (HeadPenalty, gated, {"target_heads": 4, "steps": 3, "scores": scores(), "seed": 0}),
    "penalty of alphas": (HeadPenalty, mixed, {"growth": 0.1, "growth_radius": 1e-3, "alpha_start": 2}),
    "all of a penalty": (
        HeadPenalty,
        mixed,
        {"target_heads": 4, "steps": 3, "growth": 0.1, "growth_radius": 1e-3, "alpha_start": 2, "disagreement": 0.1},
    ),
    "gates": (swap_to_gated, stock, {}),
    "alphas": (swap_to_alpha, stock, {}),
    "removal": (prune_heads, stock, {"heads": {SITE: [0]}}),
    "removal by gates": (prune_heads, gated, {}),
    "exchange": (rotate_heads, stock, {"pairs": [((SITE, 0), (SITE, 1))]}),
    "rotation": (rotate, stock, {"policy": "random", "seed": 0}),
    "rotation by hand": (rotate, stock, {"schedule": {1: [{"paths": [SITE, SITE], "heads": [0, 1]}]}}),
    "importance": (head_importance, stock, {"batches": labelled()}),
    "choice": (most_important, stock, {"scores": scores(), "target_heads": 4}),
    "calibrated swap": (
        swap_to_collaborative,
        stock,
        {"dim_shared_query_key": 16, "batches": [batch()], "refine_steps": 1, "sites": SITE},
    ),
}
# What is valid and takes forever, or is read by others.
LEFT_OUT = {"refine_steps": lambda value: type(value) is int and value > 2, "dim_shared_query_key": lambda value: True}
SIGNATURES = {rotate: HeadRotation}


def parameters(call):
    names = inspect.signature(SIGNATURES.get(call, call)).parameters
    return [name for name in names if name != "model"]


def restored(model, state):
    """Whether the model is as it was, given `snapshot`; else it has to be built anew."""
    try:
        assert_unchanged(model, state)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("odd", (WORST, pytest.param(ODD, marks=pytest.mark.slow)), ids=("worst", "all"))
@pytest.mark.parametrize("name", CALLS)
def test_a_refused_call_changes_nothing(name, odd):
    call, build, arguments = CALLS[name]
    model = build()
    before, wrong, refusals = snapshot(model), [], 0
    for parameter in parameters(call):
        for value in odd:
            if LEFT_OUT.get(parameter, lambda value: False)(value):
                continue
            said = f"{parameter}={value!r:.60}"
            try:
                call(model, **arguments | {parameter: value})
            except CollabHeadsError:
                refusals += 1
                if restored(model, before):
                    continue
                wrong.append(f"{said}: refused, but the model changed")
            except Exception as error:
                wrong.append(f"{said}: {type(error).__name__}: {error!s:.80}")
            model = build()
            before = snapshot(model)
    assert not wrong, "\n".join(wrong)
    assert refusals > len(odd) // 2
