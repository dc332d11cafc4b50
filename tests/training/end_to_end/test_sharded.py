"""Runs on FSDP2 with two processes end as those of one, and their checkpoints are those of any other run."""

import json
from collections.abc import Callable

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from later import Later, run_glue
from safetensors.torch import load_file
from scripts import ADAM32, SWAP, checkpoints, flags, run, run_on_two, to_fsdp
from transformers import AutoModelForSequenceClassification

import tiny
from collab_heads.errors import ArgumentError
from collab_heads.heads.history import HeadHistory
from collab_heads.heads.whole import is_divided
from collab_heads.training.storage.sharding import check_sharding

session = Later("collab_heads.training.runs.session")
training = Later("collab_heads.training.loop.training")

STEPS = ("--max_train_steps", 6, "--checkpointing_steps", 3, "--eval_steps", 3)
HALF = ("--per_device_train_batch_size", 4)  # on each of two processes
GATED = ("--target_heads", 5, "--selection_share", 0.5)
RUNS = {
    "plain": (),
    "swapped": SWAP,
    "narrow": (*SWAP, "--dim_value", 16),
    "learned gates": GATED,
    "pruned by importance": ("--target_heads", 5, "--head_selection", "gradient"),
    "alphas": ("--alpha_mixing", "--alpha_growth_weight", 0.5, "--alpha_growth_radius", 0.1),
    "alphas that wait": (
        "--alpha_mixing",
        "--alpha_start",
        0.8,
    ),  # at the checkpoint they have no state in the optimizer
    "swapped, gated": (*SWAP, *GATED),
}


def sharded(main: Callable) -> Callable:
    def run_sharded(arguments):
        wraps = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["BertLayer"]}
        divided, copy, made = [], training.whole_copy, session.make_accelerator
        session.make_accelerator = lambda args: to_fsdp(made(args), fsdp_version=2, **wraps)
        training.whole_copy = lambda model, kind: divided.append(is_divided(model)) or copy(model, kind)
        main(arguments)
        assert divided and all(divided)  # else these were runs with DDP

    return run_sharded


def assert_same_weights(folder, expected):
    weights, expected = (load_file(each / "model.safetensors") for each in (folder, expected))
    assert weights.keys() == expected.keys()
    for name in expected:
        if not name.endswith("key.bias"):  # its gradient is 0 but for rounding, of which Adam makes steps
            torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=ADAM32)


@pytest.mark.slow
@pytest.mark.parametrize("what", RUNS)
def test_two_processes_end_as_one(what, files, tmp_path):
    bert = tiny.save_tiny_bert(tmp_path / "bert", dropout=0.0)
    more = (*RUNS[what], *STEPS)
    one = run(bert, files, tmp_path / "one", *more)
    run_on_two(sharded(run_glue.main), flags(bert, files, tmp_path / "two", *more, *HALF))
    two = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert (one["processes"], two["processes"]) == (1, 2)
    assert_same_weights(tmp_path / "two", tmp_path / "one")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "two")
    for of_two, of_one in zip(*(checkpoints(tmp_path / name, "every") for name in ("two", "one")), strict=True):
        assert_same_weights(of_two, of_one)


@pytest.mark.slow
@pytest.mark.parametrize("what", ("learned gates", "alphas"))
def test_heads_are_looked_at_as_in_one_process(what, files, tmp_path):
    """--analyze_every gathers the weights, and the first process looks."""
    bert = tiny.save_tiny_bert(tmp_path / "bert", dropout=0.0)
    more = (*RUNS[what], *STEPS, "--analyze_every", 2)
    run(bert, files, tmp_path / "one", *more)
    run_on_two(sharded(run_glue.main), flags(bert, files, tmp_path / "two", *more, *HALF))
    one, two = (HeadHistory.load(tmp_path / name / "head_history" / "head_history.json") for name in ("one", "two"))
    assert two.moments == one.moments and two.values.keys() == one.values.keys()
    for measure, of_measure in one.values.items():
        for path, rows in of_measure.items():
            torch.testing.assert_close(two.values[measure][path], rows, rtol=0, atol=ADAM32)


@pytest.mark.slow
def test_heads_are_kept_apart_as_with_ddp(files, tmp_path):
    """Disagreement is a mean over the tokens of a process, so one process adds up other numbers."""
    bert = tiny.save_tiny_bert(tmp_path / "bert", dropout=0.0)
    more = ("--disagreement_weight", 0.1, *STEPS, *HALF)
    run_on_two(run_glue.main, flags(bert, files, tmp_path / "ddp", *more))
    run_on_two(sharded(run_glue.main), flags(bert, files, tmp_path / "fsdp", *more))
    assert_same_weights(tmp_path / "fsdp", tmp_path / "ddp")


@pytest.mark.slow
@pytest.mark.parametrize("what", ("plain", "alphas", "alphas that wait", "swapped, gated"))
def test_a_run_goes_on_from_its_checkpoint(what, files, tmp_path):
    bert = tiny.save_tiny_bert(tmp_path / "bert", dropout=0.0)
    arguments = flags(bert, files, tmp_path / "two", *RUNS[what], *STEPS, *HALF)
    run_on_two(sharded(run_glue.main), arguments)
    expected = load_file(tmp_path / "two" / "model.safetensors")
    (checkpoint,) = checkpoints(tmp_path / "two", "once")
    run_on_two(sharded(run_glue.main), [*arguments, "--resume_from_checkpoint", str(checkpoint)])
    weights = load_file(tmp_path / "two" / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_what_divided_weights_cannot_do_is_refused():
    class Accelerator:
        distributed_type = DistributedType.FSDP
        state = type("State", (), {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)})

    check_sharding(Accelerator, {"--rotate": None})
    with pytest.raises(ArgumentError, match=r"--rotate cannot be with FSDP.*DDP"):
        check_sharding(Accelerator, {"--rotate": "random", "--distill_steps": None})
    Accelerator.state.fsdp_plugin.fsdp_version = 1
    with pytest.raises(ArgumentError, match="--fsdp_version 2"):
        check_sharding(Accelerator, {})
