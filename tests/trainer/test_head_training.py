"""A Trainer with a HeadTraining takes the steps that a loop of one's own takes, and adds nothing anywhere else."""

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from trainers import (
    BATCH,
    EXAMPLES,
    QUIET,
    STEPS,
    classifier,
    exact,
    examples,
    gated,
    head_training,
    mixed,
    train,
    trainer_of,
)

from collab_heads import fold_heads, get_adapter, inspect, prune_heads, swap_to_gated
from collab_heads.errors import ArgumentError, DataError, ModelStateError
from collab_heads.training import HeadAdamW, HeadPenalty, HeadRotation
from families import FAMILIES

ADAM32 = 5e-5  # float32 gradients summed in another order, magnified where Adam divides by small ones
LOSS32 = 1e-6  # a mean over batches, in another order


def heads_of(model):
    return inspect(model).gates.open


def near(first, second):
    """But for the biases of keys: their gradient is 0 but for rounding, of which Adam makes steps."""
    ours, theirs = first.state_dict(), second.state_dict()
    return all(
        torch.allclose(tensor, theirs[name], rtol=0, atol=ADAM32)
        for name, tensor in ours.items()
        if not name.endswith(("key.bias", "c_attn.bias"))
    )


def test_the_number_of_heads_is_exact(tmp_path):
    model = train(gated(classifier()), tmp_path, exact())
    assert heads_of(model) == 3
    prune_heads(model)
    assert sum(site.num_heads for site in get_adapter(model).sites_with_heads(model)) == 3


def test_a_target_that_is_not_reached_is_said(tmp_path, warnings_logged):
    with pytest.raises(ArgumentError, match=rf"steps {STEPS + 1} is more than the {STEPS} optimizer steps of this"):
        train(gated(classifier()), tmp_path, head_training(target_heads=3, steps=STEPS + 1))

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    trainer = trainer_of(gated(classifier()), tmp_path, head_training(target_heads=3, steps=STEPS))
    trainer.add_callback(Stop())
    trainer.train()
    assert "the training ends before the number of heads reaches target_heads" in warnings_logged.text


@pytest.mark.parametrize("options", ({"target_heads": 3}, {"alpha_start": 0.5}), ids=str)
def test_a_second_training_may_be_longer(options, tmp_path):
    """A share of the steps means what it meant in the first one."""
    trainer = trainer_of(mixed(gated(classifier())), tmp_path, head_training(**options))
    trainer.train()
    first = trainer.head_training.progress
    trainer.args.num_train_epochs += 1
    trainer.train()
    then = trainer.head_training.progress
    assert then["alphas"]["done"] > 2 * first["alphas"]["done"] and then["alphas"]["start"] == first["alphas"]["start"]
    assert then["gates"]["steps"] == first["gates"]["steps"]


KINDS = {
    "a target": (gated, {"target_heads": 3, "steps": 4}),
    "alphas": (mixed, {"growth": 0.05, "alpha_start": 2}),
    "disagreement": (lambda model: model, {"disagreement": 0.5}),
}


def by_hand(model, options):
    """A loop as the documentation of HeadPenalty has it, over the batches that the Trainer takes."""
    batches = []
    probe = trainer_of(classifier(), "unused")
    for epoch in range(STEPS * BATCH // EXAMPLES):
        loader = probe.get_train_dataloader()
        loader.set_epoch(epoch)
        batches += list(loader)
    model.train()
    penalty = HeadPenalty(model, **options)
    plain = [p for name, p in model.named_parameters() if p.ndim < 2 and all(p is not q for q in penalty.parameters())]
    matrices = [p for p in penalty.others(model) if all(p is not q for q in plain)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}, *penalty.groups()]
    optimizer = HeadAdamW(groups, lr=1e-3)
    schedule = transformers.get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=len(batches))
    for batch in batches:
        (model(**batch).loss + penalty.total(batch)).backward()
        torch.nn.utils.clip_grad_norm_(penalty.others(model), 0.5)
        penalty.before_step()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        penalty.step()
    penalty.close()
    return model


SOME = [pytest.param(kind, marks=() if kind == "a target" else pytest.mark.slow) for kind in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME)
def test_steps_are_those_of_a_loop_by_hand(kind, tmp_path):
    change, options = KINDS[kind]
    ours = train(
        change(classifier(0.0)), tmp_path, head_training(**options), weight_decay=0.1, max_grad_norm=0.5, seed=42
    )
    assert near(ours, by_hand(change(classifier(0.0)), options))
    without = train(change(classifier(0.0)), tmp_path, weight_decay=0.1, max_grad_norm=0.5)
    assert not near(ours, without)


def decoder(change):
    """A GPT-2, whose loss is divided by the tokens of the whole step; a classifier's is a mean of each batch."""
    model = change(FAMILIES["gpt2"].build())
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


MODELS = {"mean of a batch": lambda change: change(classifier(0.0)), "share of a step": decoder}


@pytest.mark.slow
@pytest.mark.parametrize("loss", MODELS)
@pytest.mark.parametrize("kind", ("a target", "alphas"))
def test_batches_of_a_step_share_its_penalty(kind, loss, tmp_path):
    change, options = KINDS[kind]
    trained = []
    for batches in (1, 4):
        arguments = {"per_device_train_batch_size": BATCH // batches, "gradient_accumulation_steps": batches}
        trainer = trainer_of(MODELS[loss](change), tmp_path, head_training(**options), **arguments)
        if loss == "share of a step":
            trainer.train_dataset = [{**each, "labels": each["input_ids"]} for each in examples()]
        else:
            trainer.model_accepts_loss_kwargs = (
                False  # transformers takes any model with **kwargs for one of the others
            )
        trainer.train()
        trained.append(trainer.model)
    assert near(*trained)


@pytest.mark.slow
def test_evaluation_has_no_penalty(tmp_path):
    plain, heads = classifier(), gated(classifier())
    expected = trainer_of(plain, tmp_path).evaluate()["eval_loss"]
    trainer = trainer_of(
        heads, tmp_path, head_training(gate_weight=1.0), max_steps=1, eval_strategy="steps", eval_steps=1
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=LOSS32)
    trainer.train()
    during = next(each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each)
    assert during == pytest.approx(trainer_of(heads, tmp_path).evaluate()["eval_loss"], abs=LOSS32)


@pytest.mark.slow
def test_gates_and_alphas_have_groups_of_their_own(tmp_path):
    model = mixed(gated(classifier()))
    heads = exact(gate_lr=0.2, alpha_lr=0.3)
    trainer = trainer_of(model, tmp_path, heads, weight_decay=0.1, max_steps=2)
    trainer.train()
    *weights, gates, alphas = trainer.optimizer.param_groups
    assert [group["weight_decay"] for group in weights] == [0.1, 0.0]
    assert (gates["initial_lr"], gates["weight_decay"], gates["shared"]) == (0.2, 0.0, True)
    assert (alphas["initial_lr"], alphas["weight_decay"]) == (0.3, 0.0)
    held = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len(list(model.parameters())) == len({id(parameter) for parameter in held})


@pytest.mark.slow
def test_what_there_is_to_watch_is_logged(tmp_path):
    trainer = trainer_of(gated(classifier()), tmp_path, exact())
    trainer.train()
    opened = [each["heads_open"] for each in trainer.state.log_history if "loss" in each]
    assert opened == sorted(opened, reverse=True) and opened[-1] == 3


@pytest.mark.slow
def test_the_best_model_has_the_number_of_heads(tmp_path):
    """The first evaluations would win, and have more heads."""
    seen = []

    def metrics(prediction):
        seen.append(None)
        return {"score": -len(seen)}

    trainer = trainer_of(
        gated(classifier()),
        tmp_path,
        exact(),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
    )
    trainer.compute_metrics = metrics
    trainer.train()
    assert trainer.state.best_global_step == STEPS // 2
    assert heads_of(trainer.model) == 3


@pytest.mark.slow
def test_an_optimizer_of_ones_own_needs_the_groups(tmp_path):
    model = gated(classifier())
    trainer = trainer_of(model, tmp_path, exact())
    trainer.optimizer = torch.optim.SGD(model.classifier.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"holds no gates and alphas: give it HeadPenalty.groups"):
        trainer.train()
    with pytest.raises(ArgumentError, match=r"needs AdamW.*not Adafactor.*HeadAdamW"):
        train(gated(classifier()), tmp_path, exact(), optim="adafactor")
    train(gated(classifier()), tmp_path, head_training(gate_weight=0.1), optim="sgd", max_steps=1)


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"target is not an argument of a HeadPenalty; there are .*target_heads"):
        head_training(target=3)
    with pytest.raises(ArgumentError, match="rotation must be a HeadRotation"):
        head_training(rotation="soft")
    with pytest.raises(ArgumentError, match="batches are there to rank"):
        head_training(target_heads=3, batches=[])
    with pytest.raises(ArgumentError, match=r"steps 1.5 must be a number of optimizer steps, or a share"):
        train(gated(classifier()), tmp_path, head_training(target_heads=3, steps=1.5))
    with pytest.raises(ModelStateError, match="swap_to_gated first"):
        train(classifier(), tmp_path, exact())
    with pytest.raises(ArgumentError, match="a HeadPenalty needs gate_weight"):
        train(classifier(), tmp_path, head_training())
    heads = exact()
    trainer = trainer_of(gated(classifier()), tmp_path, heads)
    for again in (heads, exact()):
        with pytest.raises(ArgumentError, match="a HeadTraining is for one Trainer"):
            again.attach(trainer)
    assert isinstance(trainer, transformers.Trainer) and type(trainer).__name__ == "Trainer"


@pytest.mark.slow
def test_a_callback_that_is_not_attached_is_refused(tmp_path):
    """It would see the training and change nothing of it."""
    for make in (exact, lambda: head_training(rotation=HeadRotation(policy="random", count=2))):
        way_out = r"not attached to a Trainer.*HeadTraining\(...\)\.attach\(trainer\)"
        with pytest.raises(ArgumentError, match=way_out):
            transformers.Trainer(
                model=gated(classifier()),
                args=transformers.TrainingArguments(str(tmp_path), **QUIET),
                callbacks=[make()],
            )
        trainer = trainer_of(gated(classifier()), tmp_path, max_steps=1)
        trainer.add_callback(make())
        with pytest.raises(ArgumentError, match=way_out):
            trainer.train()
        with pytest.raises(ArgumentError, match=way_out):
            _ = make().model


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(ArgumentError, match="attach takes a transformers Trainer, not 'x'"):
        head_training().attach("x")
    for name, value in (("gate_lr", "x"), ("gate_lr", None), ("alpha_lr", -1), ("alpha_lr", float("nan"))):
        with pytest.raises(ArgumentError, match=f"{name} .* must be a number, 0 or more"):
            head_training(**{name: value})
    heads = exact()
    trainer_of(gated(classifier()), tmp_path, heads)
    with pytest.raises(DataError, match=r"trainer_state.json records of the heads is damaged: KeyError\('penalty'\)"):
        heads.load_state({})


@pytest.mark.slow
def test_gates_are_kept_from_weight_decay_without_a_push(tmp_path):
    """They are trained by the loss alone."""
    trainer = trainer_of(gated(classifier()), tmp_path, head_training(disagreement=0.1), weight_decay=0.1, max_steps=1)
    trainer.train()
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    decayed = [
        names[id(p)] for group in trainer.optimizer.param_groups if group["weight_decay"] for p in group["params"]
    ]
    assert decayed and not [name for name in decayed if "log_alpha" in name]


@pytest.mark.slow
def test_adapters_of_peft_are_looked_through(tmp_path):
    peft = pytest.importorskip("peft")
    model = classifier()
    swap_to_gated(model)
    config = peft.LoraConfig(target_modules=["query"], modules_to_save=["classifier"])
    wrapped = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "log_alpha" in name:
            parameter.requires_grad_(True)
    train(wrapped, tmp_path, exact())
    assert heads_of(model) == 3


@pytest.mark.slow
@pytest.mark.parametrize("change", (prune_heads, fold_heads))
def test_a_model_that_was_changed_after_its_training_needs_a_new_trainer(change, tmp_path):
    """The optimizer of a second training is that of the first, with weights that may be gone."""
    trainer = trainer_of(gated(classifier()), tmp_path, exact(), max_steps=2)
    trainer.train()
    change(trainer.model)
    with pytest.raises(ArgumentError, match=r"was changed since the last training \(prune_heads.*make a new Trainer"):
        trainer.train()
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer_of(trainer.model, tmp_path, max_steps=1).train()
    assert all(not torch.equal(tensor, before[name]) for name, tensor in trainer.model.named_parameters())


@pytest.mark.slow
def test_the_card_of_a_trainer_says_what_the_attention_is(tmp_path):
    trainer = trainer_of(gated(classifier()), tmp_path, head_training(gate_weight=0.1), num_train_epochs=1)
    trainer.train()
    trainer.save_model()
    for _ in range(2):  # each upload writes it anew
        trainer.create_model_card(model_name="small", tags=["mine"])
        card = ModelCard.load(tmp_path / "README.md")
        assert "### Training hyperparameters" in card.text and card.text.count("changes: begin") == 1
        assert {"mine", "generated_from_trainer", "gated-heads"} <= set(card.data.tags)
