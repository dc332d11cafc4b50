"""Two processes on FSDP 2 end as one without it, and go on from their checkpoints bit for bit."""

import functools
import json

import pytest
import torch
import transformers
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from scripts import ADAM32, forget_accelerate, run_on_two, to_fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from trainers import BATCH, STEPS, adapted, classifier, exact, gated, head_training, mixed, trainer_of
from transformers import AutoModelForSequenceClassification

from collab_heads import inspect, prune_heads, swap_to_collaborative
from collab_heads.errors import ArgumentError
from collab_heads.heads.whole import is_divided
from collab_heads.trainer.heads_file import FILE
from collab_heads.training import HeadRotation

LOSS32 = 1e-6  # a mean over batches, in another order
STOP = STEPS // 2 - 2


def plain(model):
    return model


def swapped(model):
    swap_to_collaborative(model, dim_shared_query_key=16)
    return gated(model)


KINDS = {
    "a target": (gated, exact),
    "a weight": (gated, lambda: head_training(gate_weight=0.05)),
    "alphas that wait": (mixed, lambda: head_training(growth=0.05, alpha_start=STOP + 1)),
    "alphas that never learn": (mixed, lambda: head_training(growth={"enc-self": 0})),
    "both": (lambda model: mixed(gated(model)), lambda: exact(growth=0.05)),
    "swapped": (swapped, exact),
    "disagreement": (plain, lambda: head_training(disagreement=0.3)),
}


@functools.cache
def sharded_trainer():
    """A Trainer that does on CPUs what `fsdp=True` does on accelerators."""

    class ShardedTrainer(transformers.Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            to_fsdp(self.accelerator, **self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True

    return ShardedTrainer


def sharded(kind, folder, *, dropout=0.0, stored="FULL_STATE_DICT", batches=1, **arguments):
    """A Trainer on each of two processes that divides its model."""
    config = {"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"], "state_dict_type": stored}
    size = {"per_device_train_batch_size": BATCH // 2 // batches, "gradient_accumulation_steps": batches}
    return trainer_for(kind, folder, sharded_trainer(), dropout, fsdp=True, fsdp_config=config, **size, **arguments)


def trainer_for(kind, folder, trainer_class=None, dropout=0.0, **arguments):
    change, heads = KINDS[kind]
    trainer = trainer_of(change(classifier(dropout)), folder, heads(), trainer_class, logging_steps=1, **arguments)
    trainer.model_accepts_loss_kwargs = False  # transformers would add up the losses of processes, as for a decoder
    return trainer


def whole_weights(trainer):
    return get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True))


def logged(trainer, name):
    return [each[name] for each in trainer.state.log_history if name in each]


def assert_near(weights, expected):
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        if not name.endswith("key.bias"):  # its gradient is 0 but for rounding, of which Adam makes steps
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=ADAM32)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "batches"), [*((kind, 1) for kind in KINDS if kind != "disagreement"), ("both", 2)])
def test_two_processes_end_as_one(kind, batches, tmp_path):
    one = trainer_for(kind, tmp_path / "one")
    one.train()
    one.save_model()
    forget_accelerate()

    def main(arguments):
        two = sharded(kind, tmp_path / "two", batches=batches)
        two.train()
        assert two.args.world_size == 2 and is_divided(two.model)
        for name in ("loss", "heads_open", "alpha_nuclear_norm"):
            assert logged(two, name) == pytest.approx(logged(one, name), abs=LOSS32 if name == "loss" else ADAM32)
        two.save_model()

    run_on_two(main, [])
    assert_near(*(load_file(tmp_path / name / "model.safetensors") for name in ("two", "one")))
    small = AutoModelForSequenceClassification.from_pretrained(tmp_path / "two")
    if kind in ("a target", "both", "swapped"):
        assert inspect(small).gates.open == 3
        prune_heads(small)


@pytest.mark.slow
def test_heads_are_kept_apart_as_with_ddp(tmp_path):
    """Disagreement is a mean over the tokens of a process, so one process adds up other numbers."""

    def main(arguments):
        ddp = trainer_for("disagreement", tmp_path, per_device_train_batch_size=BATCH // 2)
        ddp.train()
        forget_accelerate()
        fsdp = sharded("disagreement", tmp_path)
        fsdp.train()
        assert is_divided(fsdp.model) and not is_divided(ddp.model)
        assert logged(fsdp, "loss") == pytest.approx(logged(ddp, "loss"), abs=LOSS32)
        assert_near(whole_weights(fsdp), ddp.model.state_dict())

    run_on_two(main, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stored"), [*((kind, "FULL_STATE_DICT") for kind in KINDS), ("both", "SHARDED_STATE_DICT")]
)
def test_it_goes_on_as_if_it_had_not_been_stopped(kind, stored, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": STOP, "dropout": 0.1, "stored": stored}

    def main(arguments):
        unbroken = sharded(kind, tmp_path, **saving)
        unbroken.train()
        again = sharded(kind, tmp_path, **saving)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STOP}"))
        assert again.state.global_step == STEPS
        weights, expected = whole_weights(again), whole_weights(unbroken)
        assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []
        assert again.head_training.state() == json.loads(json.dumps(unbroken.head_training.state()))

    run_on_two(main, [])


@pytest.mark.slow
def test_adapters_go_on_beside_gates(tmp_path, monkeypatch):
    pytest.importorskip("peft", reason="peft is not installed")
    monkeypatch.setitem(KINDS, "adapters", (lambda model: adapted(gated(model)), exact))
    test_it_goes_on_as_if_it_had_not_been_stopped("adapters", "FULL_STATE_DICT", tmp_path)
    assert (tmp_path / f"checkpoint-{STOP}" / FILE).is_file()


@pytest.mark.slow
def test_the_best_model_and_a_second_training(tmp_path):
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    best |= {"save_steps": 1, "metric_for_best_model": "score", "greater_is_better": True}

    def main(arguments):
        seen = []
        trainer = sharded("both", tmp_path, **best)
        trainer.compute_metrics = lambda prediction: seen.append(None) or {"score": -len(seen)}
        trainer.train()
        assert trainer.state.best_global_step == STEPS // 2  # the first one with three heads
        stored = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
        weights = whole_weights(trainer)
        assert all(torch.equal(weights[name], tensor) for name, tensor in stored.items())
        assert inspect(trainer.model).gates.open == 3
        trainer.train()
        assert inspect(trainer.model).gates.open == 3 and is_divided(trainer.model)

    run_on_two(main, [])


@pytest.mark.slow
def test_every_process_begins_with_the_weights_of_the_first(tmp_path):
    """FSDP 2 would join parts of models that differ; gates, which it leaves alone, would stay different."""

    def main(arguments):
        trainer = sharded("a weight", tmp_path, learning_rate=0.0, max_steps=1)
        trainer.head_training.rates |= {"gate_lr": 0.0}
        with torch.no_grad():
            for tensor in trainer.model.parameters():
                tensor += trainer.args.process_index
        expected = gated(classifier(0.0)).state_dict()
        trainer.train()
        weights = whole_weights(trainer)
        assert [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)] == []

    run_on_two(main, [])


def refused(trainer, heads, match):
    with pytest.raises(ArgumentError, match=match):
        heads.attach(trainer)
    assert type(trainer) is transformers.Trainer and heads.attached is None


def test_what_divides_weights_otherwise_is_refused(tmp_path):
    trainer = trainer_of(gated(classifier()), tmp_path)
    trainer.is_deepspeed_enabled = True
    refused(trainer, exact(), r"DeepSpeed flattens weights .*: use FSDP 2 \(fsdp=True\), or DDP")
    trainer.is_deepspeed_enabled = False
    trainer.is_fsdp_xla_enabled = True
    refused(trainer, exact(), "FSDP of XLA flattens weights")
    trainer.is_fsdp_xla_enabled = False
    accelerator = trainer.accelerator
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)

    class Accelerator:
        distributed_type = DistributedType.FSDP
        state = type("State", (), {"fsdp_plugin": plugin})

    trainer.accelerator = Accelerator()
    refused(
        trainer, head_training(rotation=HeadRotation(policy="soft")), "a process holds only a part of the rows: use DDP"
    )
    plugin.fsdp_version = 1
    refused(trainer, exact(), r"FSDP 1 flattens weights.*: use FSDP 2 \(fsdp_version: 2, .*\), or DDP")
    trainer.accelerator = accelerator
    exact().attach(trainer)


def test_weights_that_are_divided_already_are_refused(tmp_path, monkeypatch):
    """By transformers' `distributed_config`, or tensor parallelism."""
    trainer = trainer_of(gated(classifier()), tmp_path)
    monkeypatch.setattr("collab_heads.heads.whole.DTensor", torch.nn.Parameter)
    refused(trainer, exact(), "divided among processes already .*: load the model whole")
