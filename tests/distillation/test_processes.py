"""Several processes share every batch; a process that is killed for good is gone on with."""

import os
import time

import pytest
import torch
from distilling import changed_pair, random_batches
from safetensors.torch import load_file, save_file
from scripts import fork, kill_at, run_on_two
from torch.testing import assert_close

from collab_heads import distill
from collab_heads.distillation.distill import Distillation
from collab_heads.distillation.processes import REFUSED, Processes
from collab_heads.errors import ArgumentError, CalibrationError
from families import FAMILIES

SHARED = 2e-6  # float32 gradients summed in another order, and some Adam steps after it; seen: 1.2e-7
OPTIONS = {"steps": 6, "evaluate_every": 2, "checkpoint_every": 2}


def distilled(folder, family="bert", **more):
    """A run whose weights the first process stores."""
    model, original = changed_pair(family)
    batches = random_batches(10, rows=128) if family == "bert" else [FAMILIES[family].inputs()]
    report = distill(model, original, batches, **{**OPTIONS, **more})
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, f"{folder}/{os.environ.get('RANK', 'alone')}.safetensors")
    return report


def of_two(arguments):
    distilled(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("family", ("bert", "t5-encoder"))
def test_two_processes_do_what_one_does(family, tmp_path):
    run_on_two(of_two, [str(tmp_path), family])
    distilled(tmp_path, family)
    first, second, alone = (load_file(tmp_path / f"{name}.safetensors") for name in ("0", "1", "alone"))
    for name, tensor in alone.items():
        assert torch.equal(first[name], second[name]), name
        assert_close(first[name], tensor, rtol=0, atol=SHARED, msg=name)


def different(arguments):
    model, original = changed_pair()
    with pytest.raises(CalibrationError, match="the 2 processes were given different batches"):
        distill(model, original, random_batches(10, seed=int(os.environ["RANK"])), **OPTIONS)


@pytest.mark.slow
def test_two_processes_are_given_the_same_batches(tmp_path):
    run_on_two(different, [])


def slow_steps(arguments):
    """A run that can be killed between its steps."""
    stock = Distillation.take_step

    def take_step(self, progress):
        time.sleep(0.1)
        stock(self, progress)

    Distillation.take_step = take_step
    distilled(*arguments[:1], output_dir=arguments[1], steps=40)


@pytest.mark.slow
def test_a_process_that_is_killed(tmp_path):
    out = tmp_path / "out"
    kill_at(out / "distillation", fork(slow_steps, [str(tmp_path), str(out)]))
    assert not (tmp_path / "alone.safetensors").exists()
    distilled(tmp_path, output_dir=out, steps=40)
    resumed = load_file(tmp_path / "alone.safetensors")
    distilled(tmp_path, steps=40)
    expected = load_file(tmp_path / "alone.safetensors")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())


class Stub:
    """Stands in for what an accelerator says of itself."""

    num_processes, process_index, device, mixed_precision = 1, 0, torch.device("cpu"), "no"


def accelerator(**says):
    """An Accelerator that says something else of itself."""
    accelerate = pytest.importorskip("accelerate")
    return type("Said", (accelerate.Accelerator,), {"__init__": lambda self: None, **vars(Stub), **says})()


@pytest.mark.parametrize("kind", REFUSED)
def test_ways_of_training_that_divide_the_model(kind):
    from accelerate import DistributedType

    with pytest.raises(ArgumentError, match=f"works with {kind}"):
        Processes.found(accelerator(distributed_type=DistributedType[kind]), None)


def test_the_precision_is_the_accelerators_unless_it_is_given():
    from accelerate import DistributedType

    ours = accelerator(distributed_type=DistributedType.NO, mixed_precision="bf16")
    assert Processes.found(ours, None).precision == "bf16"
    assert Processes.found(ours, "no").precision == "no"
    ours = accelerator(distributed_type=DistributedType.NO, mixed_precision="fp16")
    with pytest.raises(ArgumentError, match="'fp16': small gradients become 0"):
        Processes.found(ours, None)


def test_a_launcher_says_the_precision(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert Processes.found(None, None).precision == "bf16"


def test_an_accelerator_can_be_given_and_the_next_one_chooses_its_precision():
    from accelerate import Accelerator
    from scripts import forget_accelerate

    forget_accelerate()
    model, original = changed_pair()
    distill(model, original, random_batches(3), steps=2, mixed_precision="bf16")
    report = distill(model, original, random_batches(3), steps=2, accelerator=Accelerator(cpu=True))
    assert report.steps == 2
    forget_accelerate()
