"""All processes get what the first one computes, or learn why it could not."""

import pickle
from argparse import Namespace

import accelerate
import pytest
import torch
from accelerate import Accelerator
from scripts import run_on_two
from torch import nn

from collab_heads.base.processes import agreed, copy_from_first
from collab_heads.errors import ModelStateError, OutputError
from collab_heads.training.runs import head_changes
from collab_heads.training.runs import swap as swapping


def test_all_processes_learn_why_the_first_refuses(monkeypatch):
    """None waits for one that has left."""
    sent = []

    def broadcast(found):
        sent.append(list(found)) if main else found.__setitem__(slice(None), sent[-1])

    monkeypatch.setattr(accelerate.utils, "broadcast_object_list", broadcast)
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(type(accelerator), "num_processes", 2)

    class TwoWordsError(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} {two}")

    def refuse():
        assert main
        raise problem

    for problem in (OutputError("no"), RuntimeError("no"), MemoryError("no"), TwoWordsError("no", "memory")):
        for main in (True, False):
            monkeypatch.setattr(type(accelerator), "is_main_process", main)
            local = isinstance(problem, TwoWordsError) and not main
            with pytest.raises(
                RuntimeError if local else type(problem), match="^TwoWordsError .*no" if local else "no"
            ):
                agreed(accelerator, refuse)
            assert pickle.loads(pickle.dumps(sent[-1][1])).args
    for main in (True, False):
        monkeypatch.setattr(type(accelerator), "is_main_process", main)
        assert agreed(accelerator, lambda: 3) == 3
        assert sent[-1] == [3, None]


@pytest.mark.parametrize(
    "compute",
    (
        lambda accelerator: swapping.swap_everywhere(accelerator, Namespace(compress_budget=None), None, None),
        lambda accelerator: head_changes.importance_before_training(
            accelerator, Namespace(target_heads=3, importance_samples=4), None, lambda count: ()
        ),
    ),
)
def test_all_processes_learn_why_the_first_could_not_compute(compute, monkeypatch):
    """The others wait for a swap and for scores of heads that it computes for all."""

    def refuse(*args, **more):
        raise ModelStateError("no")

    sent = []
    monkeypatch.setattr(swapping, "swap", refuse)
    monkeypatch.setattr(head_changes, "head_importance", refuse)
    monkeypatch.setattr(accelerate.utils, "broadcast_object_list", sent.append)
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(type(accelerator), "num_processes", 2)
    with pytest.raises(ModelStateError, match="no"):
        compute(accelerator)
    assert isinstance(sent[0][1], ModelStateError)


def of_two(arguments):
    """One has its weights in another order of memory."""
    accelerator, model = Accelerator(cpu=True), nn.Linear(3, 2)
    wanted = torch.arange(6.0).view(2, 3)
    model.weight.data = wanted.clone() if accelerator.is_main_process else torch.zeros(3, 2).mT
    copy_from_first(accelerator, model.parameters())
    assert torch.equal(model.weight, wanted)
    assert model.weight.requires_grad


def test_weights_are_the_same_however_they_lie_in_memory():
    run_on_two(of_two, [])
