"""An optimizer that was made before a change says so at its first step; no other one does."""

import copy
import gc

import pytest
import torch
from trainers import adapted, classifier, gated, trainer_of

from collab_heads import (
    compress,
    fold_heads,
    prune_heads,
    rotate_heads,
    swap_to_alpha,
    swap_to_collaborative,
    swap_to_gated,
)
from collab_heads.errors import ArgumentError

REMOVED = {"enc-self": [[0], [1]]}
BATCH = {"input_ids": torch.arange(14).view(2, 7), "labels": torch.tensor([0, 1])}


def narrow(model):
    swap_to_collaborative(model, dim_shared_query_key=16)


CHANGES = {
    "swapped": narrow,
    "pruned": lambda model: prune_heads(model, heads=REMOVED),
    "compressed": lambda model: compress(model, [BATCH] * 4, 0.6, refine_steps=0),
    "swapped, pruned": lambda model: (narrow(model), prune_heads(model, heads=REMOVED)),
    "pruned, folded": lambda model: (prune_heads(model, heads=REMOVED), fold_heads(model)),
}
TOO_LATE = r"AdamW was made before layers of the BertForSequenceClassification were changed: .* a new optimizer"


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=0.1)


def step(model, optimizer):
    model(**BATCH).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("change", CHANGES)
def test_an_optimizer_from_before_a_change_is_refused(change):
    model = classifier()
    optimizer = optimizer_of(model.parameters())
    step(model, optimizer)
    CHANGES[change](model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ArgumentError, match=TOO_LATE):
        step(model, optimizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    step(model, optimizer_of(model.parameters()))  # also while the old one is alive
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters() if p.grad.any())


@pytest.mark.slow
def test_a_trainer_that_trains_again_is_refused(tmp_path):
    """It keeps its optimizer."""
    trainer = trainer_of(classifier(), tmp_path, max_steps=1)
    trainer.train()
    narrow(trainer.model)
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(ArgumentError, match=TOO_LATE + r".*make a new Trainer"):
        trainer.train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())
    trainer_of(trainer.model, tmp_path, max_steps=1).train()


def classifier_only(model):
    return optimizer_of(model.classifier.parameters()), lambda: narrow(model)


def frozen_attention(model):
    optimizer = optimizer_of(model.parameters())
    return optimizer, lambda: (narrow(model), model.bert.requires_grad_(False))


def adapters_afterwards(model):
    """The base is frozen, and what was held of it with it."""
    optimizer = optimizer_of(model.parameters())

    def change():
        prune_heads(model, heads=REMOVED)
        adapted(model)
        optimizer.add_param_group({"params": [p for name, p in model.named_parameters() if "lora" in name]})

    return optimizer, change


def new_ones_added(model):
    optimizer = optimizer_of(model.parameters())

    def change():
        held = {id(parameter) for parameter in model.parameters()}
        narrow(model)
        optimizer.add_param_group({"params": [p for p in model.parameters() if id(p) not in held]})

    return optimizer, change


def exchanged(model):
    path = "bert.encoder.layer.{}.attention.self"
    pair = ((path.format(0).removeprefix("bert."), 0), (path.format(1).removeprefix("bert."), 1))
    return optimizer_of(model.parameters()), lambda: rotate_heads(model, [pair])


def gates_added(model):
    """Nothing leaves the model."""
    return optimizer_of(model.parameters()), lambda: (swap_to_gated(model), swap_to_alpha(model))


def a_copy_changed(model):
    return optimizer_of(model.parameters()), lambda: narrow(copy.deepcopy(model))


def an_error(model):
    def change():
        with pytest.raises(ArgumentError):
            prune_heads(model, heads={"enc-self": [[0], [9]]})

    return optimizer_of(model.parameters()), change


def gone(model):
    """The changed model is no longer there; its old weights are those of another one."""
    others = [classifier()]
    for module, part in zip(model.modules(), others[0].modules(), strict=True):
        part._parameters.update(module._parameters)

    def change():
        narrow(others[0])
        others.clear()
        gc.collect()

    return optimizer_of(model.parameters()), change


@pytest.mark.parametrize(
    "make",
    (
        classifier_only,
        frozen_attention,
        adapters_afterwards,
        new_ones_added,
        exchanged,
        gates_added,
        a_copy_changed,
        an_error,
        gone,
    ),
)
def test_no_false_alarm(make):
    if make is adapters_afterwards:
        pytest.importorskip("peft", reason="peft is not installed")
    model = classifier()
    optimizer, change = make(model)
    step(model, optimizer)
    change()
    step(model, optimizer)


def test_a_checkpoint_of_a_changed_model_trains(tmp_path):
    model = gated(classifier())
    optimizer = optimizer_of(model.parameters())
    prune_heads(model, heads=REMOVED)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    step(again, optimizer_of(again.parameters()))
    assert optimizer.param_groups  # the old one is alive
