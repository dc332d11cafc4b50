"""The step: its gradient, its clipping, its schedule; and what stops a run."""

from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from later import Later
from model_configs import bert_config
from opening import gates_in
from transformers import BertConfig, BertForSequenceClassification

from collab_heads import swap_to_gated
from collab_heads.base import progress
from collab_heads.errors import ArgumentError, NonFiniteError
from collab_heads.training import HeadPenalty
from collab_heads.training.options.heads import HEADS
from collab_heads.training.options.parser import Parser
from collab_heads.training.options.run import OUTPUT, training_flags

loop, steps, training = (Later(f"collab_heads.training.loop.{name}") for name in ("fine_tune", "steps", "training"))

FP32_SUM = 1e-6  # float32 gradients summed in another order; seen: 2e-7


def arguments(*flags) -> Namespace:
    parser = Parser()
    parser.add(*training_flags(), *HEADS, *OUTPUT)
    return parser.parse_args(["--cpu", *flags])


def model(**more) -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**{**bert_config().to_dict(), **more}))


def examples(count: int) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 60, (length,), generator=generator).tolist() for length in [4, 6, 9, 5, 7] * count]
    return Dataset.from_dict({"input_ids": rows[:count], "labels": [row[0] % 2 for row in rows[:count]]})


def collate(rows) -> dict:
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([r["labels"] for r in rows])}


def hooks(evaluate=lambda *_: None, **more):
    return training.Hooks(
        collate,
        lambda batch: len(batch["labels"]),
        evaluate,
        lambda *_: None,
        dict,
        steps.TrainingSteps(lambda epoch: [], 0),
        **more,
    )


def fine_tune(accelerator, net, rows, args, hooks):
    """With the order of the examples that the scripts take."""
    return loop.fine_tune(
        accelerator, net, rows, args, replace(hooks, steps=steps.TrainingSteps.shuffled(args, rows, 1, args.seed))
    )


def accelerator() -> Accelerator:
    return Accelerator(cpu=True, step_scheduler_with_optimizer=False)


def test_accumulated_gradient_is_that_of_the_whole_batch():
    """Micro-batches of 7, 2 and 1 examples: the mean over examples, not over micro-batches."""
    rows, found = list(examples(10)), []
    for cut in ([10], [7, 2, 1]):
        net = model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
        parts = torch.arange(10).split(cut)
        batches = [collate([rows[i] for i in part]) for part in parts]
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        before = [p.detach().clone() for p in net.parameters()]
        loss = steps.optimizer_step(accelerator(), net, optimizer, batches, cut, max_grad_norm=0.0)
        found.append((loss, [b - p.detach() for b, p in zip(before, net.parameters(), strict=True)]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=FP32_SUM)
    for whole, parts in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(parts, whole, rtol=0, atol=FP32_SUM)
    assert max(float(gradient.abs().max()) for gradient in found[0][1]) > 1e-2


def test_an_empty_micro_batch_counts_for_nothing():
    rows, results = list(examples(4)), []
    for weights in ([3], [3, 0]):
        net = model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
        batches = [collate(rows[:3]), collate(rows[3:])][: len(weights)]
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        steps.optimizer_step(accelerator(), net, optimizer, batches, weights, max_grad_norm=0.0)
        results.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    torch.testing.assert_close(*results, rtol=0, atol=FP32_SUM)


def test_gradients_are_clipped():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    before = [p.detach().clone() for p in net.parameters()]
    steps.optimizer_step(accelerator(), net, optimizer, [collate(list(examples(6)))], [6], max_grad_norm=0.01)
    moved = sum(float((b - p.detach()).square().sum()) for b, p in zip(before, net.parameters(), strict=True)) ** 0.5
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_norms_and_biases_do_not_decay():
    net = model()
    decayed, plain = steps.parameter_groups(net, 0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in net.named_parameters()}
    assert all(names[id(p)].endswith("weight") and "LayerNorm" not in names[id(p)] for p in decayed["params"])
    assert all("bias" in names[id(p)] or "LayerNorm" in names[id(p)] for p in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(names)
    net.requires_grad_(False)
    with pytest.raises(ArgumentError, match="trainable"):
        steps.parameter_groups(net, 0.1)


def test_schedule_evaluations_and_counts(tmp_path):
    """50 examples in steps of 8 are 7 steps an epoch; evaluation comes after each epoch and at the end."""
    calls = []
    args = arguments(*"--max_train_steps 10 --num_warmup_steps 4 --learning_rate 1e-2".split())
    trained = fine_tune(
        accelerator(), model(), examples(50), args, hooks(lambda m, epoch, step: calls.append((epoch, step)))
    )
    assert calls == [(1, 7), (2, 10)]
    assert (trained.steps, trained.examples) == (10, 50 + 24)
    assert trained.seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize("epochs", (30, 0))
def test_training_learns_and_zero_epochs_do_not(epochs):
    net, calls = model(), []
    before = [p.detach().clone() for p in net.parameters()]
    args = arguments("--num_train_epochs", str(epochs), "--learning_rate", "1e-2", "--warmup_ratio", "0.1")
    fine_tune(accelerator(), net, examples(40), args, hooks(lambda *_: calls.append(1)))
    batch = collate(list(examples(40)))
    with torch.no_grad():
        accuracy = (net.eval()(**batch).logits.argmax(-1) == batch["labels"]).float().mean()
    assert any(not torch.equal(b, p) for b, p in zip(before, net.parameters(), strict=True)) == (epochs > 0)
    assert len(calls) == epochs
    assert not epochs or accuracy > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("every", (2, 50))
def test_the_loss_is_on_the_bar_and_its_mean_in_the_end(every, monkeypatch):
    shown, losses = [], []

    def step(*args):
        losses.append(float(steps.optimizer_step(*args)))
        return torch.tensor(losses[-1])

    monkeypatch.setattr(progress.Loop, "show", lambda bar, text: shown.append(text))
    monkeypatch.setattr("collab_heads.training.loop.fine_tune.optimizer_step", step)
    args = arguments("--num_train_epochs", "1", "--logging_steps", str(every))
    trained = fine_tune(accelerator(), model(), examples(34), args, hooks())
    assert len(losses) == 5
    groups = [losses[:2], losses[2:4], losses[4:]] if every == 2 else [losses]
    assert shown == [f"loss {sum(group) / len(group):.4g}" for group in groups]
    assert trained.loss == pytest.approx(sum(losses) / 5, rel=1e-12)


def test_divergence_stops_the_run():
    net = model()
    net.classifier.weight.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="at step 1: lower --learning_rate"):
        fine_tune(accelerator(), net, examples(8), arguments("--logging_steps", "1"), hooks())


@pytest.mark.slow
def test_model_is_plain_again_after_training():
    """The wrapper of mixed precision must not be left on a model that is swapped or saved next."""
    net = model()
    fine_tune(
        Accelerator(cpu=True, step_scheduler_with_optimizer=False),
        net,
        examples(8),
        arguments("--max_train_steps", "1"),
        hooks(),
    )
    assert "forward" not in vars(net)
    assert not net.training


def gated_model() -> BertForSequenceClassification:
    """Without dropout; its gates, half open and in evaluation mode, pass their values and gradients, not samples."""
    net = model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    swap_to_gated(net, init_log_alpha=0.5)
    net.train()
    for _, gates in gates_in(net):
        gates.eval()
    return net


def test_gates_are_a_group_of_their_own():
    """Without weight decay, at their own rate; also where all else is frozen."""
    net = gated_model()
    penalty = HeadPenalty(net, gate_weight=1.0)
    gates = penalty.parameters()
    decayed, plain, own = steps.parameter_groups(net, 0.1, penalty, gate_lr=0.25)
    assert [id(p) for p in own["params"]] == [id(p) for p in gates] and len(gates) == 2
    assert (own["weight_decay"], own["lr"], own["shared"]) == (0.0, 0.25, False)
    assert steps.parameter_groups(net, 0.1, HeadPenalty(net, target_heads=3, steps=2), gate_lr=0.25)[-1]["shared"]
    assert "lr" not in decayed and "lr" not in plain
    assert not {id(p) for p in gates} & {id(p) for p in decayed["params"] + plain["params"]}
    assert len(decayed["params"]) + len(plain["params"]) + 2 == len(list(net.parameters()))
    for parameter in net.parameters():
        parameter.requires_grad_(any(parameter is gate for gate in gates))
    assert steps.parameter_groups(net, 0.1, penalty, gate_lr=0.25) == [own]


def test_the_penalty_counts_once_however_the_batch_is_cut():
    rows, slopes = list(examples(10)), {}
    for weight in (0.0, 0.3):
        for cut in ([10], [7, 2, 1], [10, 0]):
            net = gated_model()
            penalty = HeadPenalty(net, gate_weight=weight)
            before = torch.cat([gate.detach().clone() for gate in penalty.parameters()])
            batches = [collate([rows[i] for i in part] or rows[:1]) for part in torch.arange(10).split(cut)]
            optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
            loss = steps.optimizer_step(accelerator(), net, optimizer, batches, cut, 0.0, penalty)
            assert penalty.parts["gates"].done == 1
            slopes[weight, len(cut), cut[-1]] = before - torch.cat([g.detach() for g in penalty.parameters()]), loss
    (plain, loss), *_ = slopes.values()
    share = torch.sigmoid(torch.tensor(0.5 - 0.33 * torch.tensor(0.1 / 1.1).log()))  # P(g != 0)
    for (weight, *_), (slope, found) in slopes.items():
        torch.testing.assert_close(slope, plain + weight * share * (1 - share), rtol=0, atol=FP32_SUM)
        torch.testing.assert_close(found, loss, rtol=0, atol=FP32_SUM)  # the loss that is logged is the task's
    assert plain.abs().max() > 1e-3


def test_clipping_leaves_gates_alone():
    """Their gradients neither count for the norm nor are cut."""
    moved = {}
    for norm in (0.0, 0.01):
        net = gated_model()
        penalty = HeadPenalty(net, gate_weight=5.0)
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        steps.optimizer_step(accelerator(), net, optimizer, [collate(list(examples(6)))], [6], norm, penalty)
        moved[norm] = {name: before[name] - p.detach() for name, p in net.named_parameters()}
    gates = {name for name in before if name.endswith("log_alpha")}
    assert len(gates) == 2
    rest = sum(float(d.square().sum()) for name, d in moved[0.01].items() if name not in gates) ** 0.5
    assert rest == pytest.approx(0.01, rel=1e-3)
    for name in gates:
        torch.testing.assert_close(moved[0.01][name], moved[0.0][name], rtol=0, atol=FP32_SUM)
        assert moved[0.0][name].norm() > 1


@pytest.mark.slow
def test_the_penalty_goes_through_the_training(monkeypatch):
    """It learns the number of steps, steps with the optimizer, and its numbers are logged beside the loss."""
    net, made, logged, groups = gated_model(), [], [], []

    def penalty(total):
        made.append((total, HeadPenalty(net, target_heads=3, steps=5)))
        return made[-1][1]

    stock = training.optimizer_and_schedule
    monkeypatch.setattr(
        "collab_heads.training.loop.training.optimizer_and_schedule",
        lambda g, *rest, **kw: groups.extend(g) or stock(g, *rest, **kw),
    )
    ours = accelerator()
    monkeypatch.setattr(ours, "log", lambda values, step: logged.append((step, values)))
    args = arguments(*"--max_train_steps 8 --logging_steps 2 --weight_decay 0.3 --gate_learning_rate 0.2".split())
    fine_tune(ours, net, examples(24), args, hooks(penalty=penalty, rates={"gate_lr": args.gate_learning_rate}))
    ((total, found),) = made
    assert (total, found.parts["gates"].done) == (8, 8)
    assert [id(p) for p in groups[-1]["params"]] == [id(p) for p in found.parameters()]
    assert (groups[0]["weight_decay"], groups[-1]["weight_decay"], groups[-1]["initial_lr"]) == (0.3, 0.0, 0.2)
    assert [step for step, _ in logged] == [2, 4, 6, 8]
    assert [values["heads_open"] for _, values in logged] == [6, 4, 3, 3]
    assert [values["heads_sparsity"] for _, values in logged] == [0.25, 0.5, 0.625, 0.625]
    assert [values["heads_decided"] for _, values in logged][-2:] == [8, 8]
    assert all({"train_loss", "learning_rate", "heads_expected"} <= values.keys() for _, values in logged)


def test_trackers_count_on_after_the_steps_that_were_taken_before(monkeypatch):
    """Evaluations are logged so; the training before may have ended early."""
    logged, ours = [], accelerator()
    monkeypatch.setattr(ours, "log", lambda values, step: logged.append(step))
    args = arguments(*"--max_train_steps 3 --logging_steps 2".split())
    fine_tune(ours, model(), examples(24), args, hooks(steps_before=4))
    assert logged == [6, 7]


@pytest.mark.slow
def test_without_a_penalty_nothing_about_heads_is_logged(monkeypatch):
    logged, ours = [], accelerator()
    monkeypatch.setattr(ours, "log", lambda values, step: logged.append(values))
    fine_tune(ours, model(), examples(8), arguments("--max_train_steps", "1"), hooks())
    assert [values.keys() for values in logged] == [{"train_loss", "learning_rate", "phase"}]
