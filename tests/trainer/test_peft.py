"""Adapters of PEFT beside gates and alphas: what PEFT does not store of a model is stored beside it."""

import json
import os

import pytest
import torch
import transformers
from later import peft
from safetensors.torch import load_file
from trainers import STEPS, adapted, classifier, exact, gated, head_training, mixed, same_weights, trainer_of

from collab_heads import prune_heads, swap_to_gated
from collab_heads.errors import ArgumentError, DataError, OutputError, UnsupportedModelError
from collab_heads.trainer.heads_file import FILE
from collab_heads.training import HeadRotation, load_heads, save_heads


def plain(model):
    return model


KINDS = {
    "alphas": (mixed, lambda: head_training(growth=0.05, alpha_start=1, growth_radius=0.01)),
    "a target": (gated, lambda: exact(seed=3)),
    "a weight": (gated, lambda: head_training(gate_weight=0.05)),
    "disagreement": (plain, lambda: head_training(disagreement=0.3)),
    "both": (lambda model: mixed(gated(model)), lambda: exact(growth=0.05)),
}


def heads_of(trainer):
    """Copies of the gates and alphas of a Trainer's model."""
    named = trainer.model.named_parameters()
    return {name: each.detach().clone() for name, each in named if name.endswith(("log_alpha", ".alpha"))}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_with_adapters_ends_as_an_unbroken_one(kind, tmp_path):
    change, heads = KINDS[kind]
    saving = {"save_strategy": "steps", "save_steps": 3}
    unbroken = trainer_of(adapted(change(classifier())), tmp_path, heads(), **saving)
    unbroken.train()
    again = trainer_of(adapted(change(classifier())), tmp_path, heads(), **saving)
    begun = heads_of(again)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.state.global_step == STEPS
    assert same_weights(again.model, unbroken.model) == []
    assert again.head_training.state() == json.loads(json.dumps(unbroken.head_training.state()))
    assert (tmp_path / "checkpoint-3" / FILE).exists() == bool(begun)
    assert all(not torch.equal(tensor, heads_of(again)[name]) for name, tensor in begun.items())  # they learned


@pytest.mark.slow
def test_the_best_model_has_the_heads_that_it_had(tmp_path):
    class GetsWorse(transformers.TrainerCallback):
        """The evaluation after the first epoch is the best."""

        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            metrics["eval_loss"] = state.epoch

    best = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
    trainer = trainer_of(adapted(mixed(classifier())), tmp_path, head_training(growth=0.05), **best)
    trainer.add_callback(GetsWorse())
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{STEPS // 2}")
    first, last = (load_file(tmp_path / f"checkpoint-{step}" / FILE) for step in (STEPS // 2, STEPS))
    ended = {name.partition("bert.")[2]: tensor for name, tensor in heads_of(trainer).items()}
    assert all(
        torch.equal(tensor, first[name]) and not torch.equal(tensor, last[name]) for name, tensor in ended.items()
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A Trainer that has trained adapters beside gates, and what it saved."""
    folder = tmp_path_factory.mktemp("trained")
    trainer = trainer_of(adapted(gated(classifier())), folder, exact(), num_train_epochs=1)
    trainer.train()
    trainer.save_model(folder / "adapters")
    return trainer, folder / "adapters"


@pytest.mark.slow
def test_gates_are_read_elsewhere(trained):
    trainer, folder = trained
    again = peft.PeftModel.from_pretrained(gated(classifier()), folder)
    assert same_weights(again, trainer.model)
    load_heads(again, folder)
    assert same_weights(again, trainer.model) == []
    assert sum(site.heads_after for site in prune_heads(again.merge_and_unload()).sites) == 3


def test_gates_are_written_elsewhere(trained, tmp_path):
    """The same file; of a model that is stored whole there is none."""
    trainer, folder = trained
    save_heads(trainer.model, tmp_path)
    assert (tmp_path / FILE).read_bytes() == (folder / FILE).read_bytes()
    save_heads(gated(classifier()), tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_gates_of_other_heads_are_refused(trained, tmp_path):
    _, folder = trained
    model = classifier()
    prune_heads(model, heads={"enc-self": [[0], []]})
    swap_to_gated(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ArgumentError, match=r"layer\.0.*log_alpha is \(4,\), in the model \(3,\): change the model"):
        load_heads(model, folder)
    with pytest.raises(ArgumentError, match="in the model not there: change the model"):
        load_heads(classifier(), folder)
    with pytest.raises(ArgumentError, match=f"no gates and alphas beside the adapters in .*: it has no {FILE}"):
        load_heads(model, tmp_path)
    os.symlink("/proc/self/mem", tmp_path / FILE)  # a file that fails when it is read
    with pytest.raises(DataError, match=f"{FILE} is damaged, or cannot be read: "):
        load_heads(model, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("function", (save_heads, load_heads))
def test_wrong_calls_are_named(function, trained, tmp_path):
    trainer, _ = trained
    for folder in (None, 5, b"x", "a\0b"):
        with pytest.raises(ArgumentError, match="folder must be a text or a path, not"):
            function(trainer.model, folder)
    for model in (None, "x", torch.nn.Linear(2, 2)):
        with pytest.raises(UnsupportedModelError, match=r"transformers (model in a|PreTrainedModel, got)"):
            function(model, tmp_path)
    with pytest.raises(OutputError if function is save_heads else ArgumentError):
        function(trainer.model, "x" * 300)
    (tmp_path / FILE).mkdir()
    with pytest.raises(OutputError if function is save_heads else ArgumentError):
        function(trainer.model, tmp_path)


@pytest.mark.slow
def test_a_checkpoint_without_them_is_not_gone_on_from(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3}
    trainer_of(adapted(mixed(classifier())), tmp_path, head_training(growth=0.05), **saving).train()
    (tmp_path / "checkpoint-3" / FILE).unlink()
    again = trainer_of(adapted(mixed(classifier())), tmp_path, head_training(growth=0.05), **saving)
    with pytest.raises(ArgumentError, match=f"it has no {FILE}"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.mark.slow
def test_rotation_beside_adapters_is_refused_before_the_training(tmp_path):
    heads = head_training(rotation=HeadRotation(policy="random", count=2))
    with pytest.raises(ArgumentError, match=r"weights that PEFT does not store.*merge_and_unload"):
        trainer_of(adapted(classifier()), tmp_path, heads).train()


def test_the_card_of_adapters_does_not_say_how_a_whole_model_loads(tmp_path):
    trainer = trainer_of(adapted(gated(classifier())), tmp_path, head_training(gate_weight=0.05))
    trainer.save_model()
    trainer.create_model_card(model_name="small")
    card = (tmp_path / "README.md").read_text()
    assert "library_name: peft" in card and "collab_heads attention" not in card
