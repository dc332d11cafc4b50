"""A training that goes on from a checkpoint ends as one that was never stopped, bit for bit."""

import json

import pytest
import torch
from later import Later
from trainers import STEPS, classifier, exact, gated, head_training, mixed, same_weights, trainer_of

from collab_heads import inspect, prune_heads
from collab_heads.errors import ArgumentError, DataError
from collab_heads.training import HeadRotation
from families import FAMILIES

attached = Later("collab_heads.trainer.attached")

SCORES = {f"encoder.layer.{i}.attention.self": torch.tensor([0.4, 0.1, 0.3, 0.2]) + i for i in range(2)}
EXCHANGE = {"2": [{"role": "enc-self", "layers": [0, 1], "heads": [0, 3]}]}
KINDS = {
    "a target": (gated, lambda: exact(seed=3)),
    "a target from scores": (gated, lambda: exact(scores=SCORES)),
    "a weight": (gated, lambda: head_training(gate_weight=0.05)),
    "alphas": (mixed, lambda: head_training(growth=0.05, alpha_start=0.3, growth_radius=0.01)),
    "frozen alphas": (mixed, lambda: head_training(growth={"enc-self": 0})),
    "disagreement": (lambda model: model, lambda: head_training(disagreement=0.3)),
    "a plan": (lambda model: model, lambda: head_training(rotation=HeadRotation(EXCHANGE))),
    "a rule": (gated, lambda: exact(rotation=HeadRotation(policy="local", exclude=(), start=2))),
    "chance": (lambda model: model, lambda: head_training(rotation=HeadRotation(policy="random", count=2))),
}
IN_THE_MIDDLE, AT_AN_EPOCH = 3, STEPS // 2


EVERY = [
    pytest.param(kind, stop, marks=() if (kind, stop) == ("a target", IN_THE_MIDDLE) else pytest.mark.slow)
    for kind in KINDS
    for stop in (IN_THE_MIDDLE, AT_AN_EPOCH)
]


@pytest.mark.parametrize(("kind", "stop"), EVERY)
def test_it_ends_as_an_unbroken_one(kind, stop, tmp_path):
    change, heads = KINDS[kind]
    # transformers evaluates after an epoch's last step, which draws: a checkpoint between the two would not be exact
    saves = {"save_strategy": "epoch"} if stop == AT_AN_EPOCH else {"save_strategy": "steps", "save_steps": stop}
    saving = {**saves, "eval_strategy": "epoch"}
    unbroken = trainer_of(change(classifier()), tmp_path, heads(), **saving)
    unbroken.train()
    checkpoint = tmp_path / f"checkpoint-{stop}"
    again = trainer_of(change(classifier()), tmp_path, heads(), **saving)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert again.state.global_step == STEPS
    assert same_weights(again.model, unbroken.model) == []
    assert again.head_training.state() == json.loads(json.dumps(unbroken.head_training.state()))
    without = trainer_of(change(classifier()), tmp_path / "without", **saving)
    without.train()
    assert same_weights(without.model, unbroken.model)  # heads did something


@pytest.mark.slow
def test_the_newest_checkpoint_and_other_callbacks(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 4, "restore_callback_states_from_checkpoint": True}
    unbroken = trainer_of(gated(classifier()), tmp_path, exact(), **saving)
    unbroken.train()
    again = trainer_of(gated(classifier()), tmp_path, exact(), **saving)
    again.train(resume_from_checkpoint=True)
    assert same_weights(again.model, unbroken.model) == []
    assert inspect(again.model).gates.open == 3


@pytest.mark.slow
def test_a_trainer_that_has_trained_goes_on(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 4}
    trainer = trainer_of(gated(classifier()), tmp_path, exact(), **saving)
    trainer.train()
    ended = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert all(torch.equal(tensor, ended[name]) for name, tensor in trainer.model.state_dict().items())


@pytest.mark.slow
def test_a_second_training_keeps_the_heads_that_the_first_has_chosen(tmp_path):
    trainer = trainer_of(gated(classifier()), tmp_path, exact())
    trainer.train()
    chosen = inspect(trainer.model).gates.to_dict()
    trainer.train()
    assert inspect(trainer.model).gates.to_dict() == chosen
    assert all(each["heads_open"] == 3 for each in trainer.state.log_history if "loss" in each)


@pytest.mark.slow
def test_another_training_is_not_gone_on_with(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 4}
    trainer_of(gated(classifier()), tmp_path, exact(), **saving).train()
    with pytest.raises(ArgumentError, match=r"not the state of this penalty.*target 3, not 4"):
        trainer_of(gated(classifier()), tmp_path, head_training(target_heads=4, steps=0.5), **saving).train(
            resume_from_checkpoint=True
        )
    trainer_of(gated(classifier()), tmp_path / "plain", **saving).train()
    with pytest.raises(ArgumentError, match="written without a HeadTraining"):
        trainer_of(gated(classifier()), tmp_path / "plain", exact(), **saving).train(resume_from_checkpoint=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "began, goes_on, message",
    (
        ({"gate_weight": 0.05, "rotation": "random"}, {"gate_weight": 0.05}, "with a rotation, .* has none"),
        ({"gate_weight": 0.05}, {"gate_weight": 0.05, "rotation": "random"}, "without a rotation, .* has one"),
        ({"disagreement": 0.1, "rotation": "random"}, {"rotation": "random"}, "with a penalty, .* has none"),
        ({"rotation": "random"}, {"disagreement": 0.1, "rotation": "random"}, "without a penalty, .* has one"),
        ({"gate_weight": 0.05}, {"gate_weight": 0.05, "gate_lr": 0.5}, "gate_lr': 0.1.* and are .*'gate_lr': 0.5"),
    ),
)
def test_a_training_goes_on_with_what_it_began_with(began, goes_on, message, tmp_path):
    def trainer(options):
        policy = options.get("rotation")
        heads = head_training(**{**options, "rotation": policy and HeadRotation(policy=policy, count=2)})
        model = gated(classifier()) if "gate_weight" in options else classifier()
        return trainer_of(model, tmp_path, heads, save_strategy="steps", save_steps=4)

    trainer(began).train()
    with pytest.raises(ArgumentError, match=message):
        trainer(goes_on).train(resume_from_checkpoint=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, message",
    (
        (lambda gates: gates.update(done=-1), "-1 steps are done"),
        (lambda gates: gates.update(done=float("nan")), "nan steps are done"),
        (lambda gates: gates["log_alpha"][0].__setitem__(0, float("inf")), "gates hold NaN or inf"),
        (lambda gates: gates["log_alpha"][0].__setitem__(0, "x"), "is damaged"),
    ),
)
def test_damaged_progress_is_seen(change, message, tmp_path):
    def trainer():
        return trainer_of(gated(classifier()), tmp_path, exact(), save_strategy="steps", save_steps=4)

    trainer().train()
    (file,) = tmp_path.glob("checkpoint-4/trainer_state.json")
    state = json.loads(file.read_text())
    change(state["stateful_callbacks"]["HeadTraining"]["attributes"]["penalty"]["gates"])
    file.write_text(json.dumps(state))
    with pytest.raises((ArgumentError, DataError), match=message):
        trainer().train(resume_from_checkpoint=str(file.parent))


@pytest.mark.slow
def test_only_safetensors_and_json_of_ours(tmp_path):
    """What transformers writes itself is torch's; heads add nothing to it."""
    saving = {"save_strategy": "steps", "save_steps": 4}
    trainer_of(gated(classifier()), tmp_path / "plain", **saving).train()
    trainer_of(gated(classifier()), tmp_path / "heads", exact(), **saving).train()
    names = [sorted(path.name for path in (tmp_path / each / "checkpoint-4").iterdir()) for each in ("plain", "heads")]
    assert names[0] == names[1]


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    """Shapes agree, and transformers would load it."""

    def pruned(heads):
        model = classifier()
        prune_heads(model, heads={"enc-self": heads})
        return gated(model)

    trainer_of(pruned([[0], [1]]), tmp_path, exact(), save_strategy="steps", save_steps=4, max_steps=4).train()
    other = trainer_of(pruned([[2], [3]]), tmp_path, exact(), max_steps=4)
    before = {name: tensor.clone() for name, tensor in other.model.state_dict().items()}
    with pytest.raises(ArgumentError, match=r"checkpoint-4 is of a model whose attention was changed in another way"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.model.state_dict().items())


class BreaksOff:
    """A training step that fails once."""

    def __init__(self, trainer, error, at=3):
        self.stock, self.error, self.left = trainer.training_step, error, at

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if not self.left:
            raise self.error
        return self.stock(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("error", (KeyboardInterrupt(), RuntimeError("CUDA out of memory.")))
def test_a_training_that_was_broken_off_begins_again(error, tmp_path):
    """By hand, or with a smaller batch, so with more steps; nothing listens twice."""
    heads = exact(disagreement=0.1)
    trainer = trainer_of(gated(classifier()), tmp_path, heads, auto_find_batch_size=True)
    trainer.training_step = BreaksOff(trainer, error)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    trainer.train()
    assert inspect(trainer.model).gates.open == 3 and heads.penalty is None
    assert not any(module._forward_pre_hooks for module in trainer.model.modules())


@pytest.mark.parametrize(
    "text", ("{", "[]", '{"collab_heads": [1]}', '{"collab_heads": {"sites": {"a": 1}}}', "[" * 10**5)
)
def test_a_config_of_a_checkpoint_that_is_none(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DataError, match=r"config\.json is not a config of a changed model: .*another checkpoint"):
        attached.check_same_heads(FAMILIES["bert"].build(), tmp_path)
