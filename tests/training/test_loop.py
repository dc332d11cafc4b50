"""The step: its gradient, its clipping, its schedule; and what stops a run."""

from argparse import Namespace

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification

from collab_heads.errors import ArgumentError, NonFiniteError
from collab_heads.training.arguments import Parser, add_output_arguments, add_training_arguments
from collab_heads.training.loop import Hooks, fine_tune, optimizer_step, parameter_groups
from families import bert_config

FP32_SUM = 1e-6  # float32 gradients summed in another order; seen: 2e-7


def arguments(*flags) -> Namespace:
    parser = Parser(allow_abbrev=False)
    add_training_arguments(parser)
    add_output_arguments(parser)
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


def hooks(evaluate=lambda *_: None) -> Hooks:
    return Hooks(collate, lambda batch: len(batch["labels"]), evaluate, lambda *_: None, dict)


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
        loss = optimizer_step(accelerator(), net, optimizer, batches, cut, max_grad_norm=0.0)
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
        optimizer_step(accelerator(), net, optimizer, batches, weights, max_grad_norm=0.0)
        results.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    torch.testing.assert_close(*results, rtol=0, atol=FP32_SUM)


def test_gradients_are_clipped():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer_step(accelerator(), net, optimizer, [collate(list(examples(6)))], [6], max_grad_norm=0.01)
    moved = sum(float((b - p.detach()).square().sum()) for b, p in zip(before, net.parameters(), strict=True)) ** 0.5
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_norms_and_biases_do_not_decay():
    net = model()
    decayed, plain = parameter_groups(net, 0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in net.named_parameters()}
    assert all(names[id(p)].endswith("weight") and "LayerNorm" not in names[id(p)] for p in decayed["params"])
    assert all("bias" in names[id(p)] or "LayerNorm" in names[id(p)] for p in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(names)
    net.requires_grad_(False)
    with pytest.raises(ArgumentError, match="trainable"):
        parameter_groups(net, 0.1)


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


def test_divergence_stops_the_run():
    net = model()
    net.classifier.weight.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="at step 1: lower --learning_rate"):
        fine_tune(accelerator(), net, examples(8), arguments("--logging_steps", "1"), hooks())


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
