"""Checkpoints: found by their age, refused when they are not what they seem, written whole or not at all."""

import json
import shutil

import pytest
import torch
from accelerate import Accelerator

from collab_heads.errors import OutputError
from collab_heads.files.checkpoint import FORMAT
from collab_heads.files.folders import digest, write_manifest
from collab_heads.training.storage.checkpoint import (
    find_checkpoint,
    load_progress,
    load_state,
    prune_checkpoints,
    save_checkpoint,
)

PLACES = {"step_0_10": (0, 10), "step_0_9": (0, 9), "epoch_0_2": (0, 14), "step_1_5": (1, 5), "step_1_40": (1, 40)}


def write_checkpoint(output_dir, name, phase, step, processes=1, without=()):
    """A folder that looks like a finished checkpoint."""
    folder = output_dir / name
    folder.mkdir(parents=True)
    for file in (
        "config.json",
        "optimizer.bin",
        "scheduler.bin",
        *(f"random_states_{i}.pkl" for i in range(processes)),
    ):
        if file not in without:
            (folder / file).touch()
    progress = {"phase": phase, "step": step, "run": {"processes": processes}, "format": FORMAT}
    if "progress.json" not in without:
        (folder / "progress.json").write_text(json.dumps(progress))
        write_manifest(folder, {file.name: digest(file) for file in folder.iterdir()})
    return folder


@pytest.fixture
def run(tmp_path):
    """An output folder with five checkpoints and things that are none."""
    for name, place in PLACES.items():
        write_checkpoint(tmp_path, name, *place)
    write_checkpoint(tmp_path, "step_1_50.partial", 1, 50)
    write_checkpoint(tmp_path, "step_2_1", 2, 1, without=["progress.json"])
    write_checkpoint(tmp_path, "my_step_9_9", 9, 9)
    (tmp_path / "step_9_9").write_text("a file")
    return tmp_path


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_the_newest_checkpoint_is_of_the_last_phase_and_then_the_last_step(run):
    for expected in ("step_1_40", "step_1_5", "epoch_0_2", "step_0_10", "step_0_9"):
        found = find_checkpoint("latest", run)
        assert found == run / expected
        shutil.rmtree(found)
    with pytest.raises(OutputError, match=f"{run} holds no finished checkpoint: .* give --overwrite_output_dir"):
        find_checkpoint("latest", run)


def test_a_named_checkpoint_is_taken_as_it_is(run):
    assert find_checkpoint(str(run / "step_0_9"), run) == run / "step_0_9"


@pytest.mark.parametrize("keep, left", ((1, {"step_1_40"}), (2, {"step_1_40", "step_1_5"}), (9, {*PLACES})))
def test_pruning_keeps_the_newest_and_what_is_no_checkpoint(keep, left, run):
    others = names(run) - PLACES.keys()
    prune_checkpoints(run, keep)
    assert names(run) == left | others


def test_what_comes_after_the_checkpoint_that_a_run_went_on_from_neither_counts_nor_goes(run):
    prune_checkpoints(run, 2, run / "epoch_0_2")
    assert names(run) & PLACES.keys() == PLACES.keys() - {"step_0_9"}


def test_without_a_limit_nothing_is_pruned(run):
    before = names(run)
    prune_checkpoints(run, None)
    assert names(run) == before


def test_progress_is_read_back(tmp_path):
    folder = write_checkpoint(tmp_path, "step_0_3", 0, 3, processes=2)
    assert load_progress(folder) == {"phase": 0, "step": 3, "run": {"processes": 2}}


@pytest.mark.parametrize(
    "without, message",
    (
        (["optimizer.bin"], "lacks optimizer.bin: it is damaged"),
        (["config.json", "random_states_1.pkl"], "lacks config.json, random_states_1.pkl"),
        (["progress.json"], "is not a finished checkpoint"),
    ),
)
def test_a_checkpoint_that_lacks_a_file_is_refused(without, message, tmp_path):
    folder = write_checkpoint(tmp_path, "step_0_3", 0, 3, processes=2, without=without)
    with pytest.raises(OutputError, match=message) as caught:
        load_progress(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "text", ("", "{", "[]", '{"phase": 0, "step": 3, "run": {}, "format": 3}', '{"step": 3, "format": 3}', "null")
)
def test_progress_that_is_broken_is_refused(text, tmp_path):
    folder = write_checkpoint(tmp_path, "step_0_3", 0, 3)
    (folder / "progress.json").write_text(text)
    with pytest.raises(OutputError, match=r"is not a finished checkpoint \(no valid progress.json"):
        load_progress(folder)


def test_unfinished_checkpoints_and_other_paths_are_refused(run):
    with pytest.raises(OutputError, match="was not finished: the run ended while writing it"):
        load_progress(run / "step_1_50.partial")
    for name in ("step_7_7", "step_9_9"):
        with pytest.raises(OutputError, match=f"{name} is not a folder"):
            load_progress(run / name)


def prepared():
    """An accelerator, a model, and its optimizer and schedule after a step."""
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    return accelerator, model, optimizer, schedule


def save_into(folder):
    (folder / "config.json").write_text("model")


def test_optimizer_schedule_and_random_numbers_come_back(tmp_path):
    accelerator, model, optimizer, schedule = prepared()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    schedule.step()
    progress = {"phase": 1, "step": 1, "run": {"processes": 1}}
    folder = tmp_path / "out" / "step_1_1"
    save_checkpoint(accelerator, folder, save_into, progress)
    drawn, state = torch.rand(3), optimizer.state_dict()["state"][0]["exp_avg"].clone()
    assert names(folder.parent) == {"step_1_1"}
    assert load_progress(folder) == progress
    assert not any("model" in name for name in names(folder))  # save_model has done that
    accelerator, model, optimizer, schedule = prepared()
    before = model.weight.detach().clone()
    torch.manual_seed(99)
    load_state(accelerator, folder)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], state)
    assert schedule.get_last_lr() == [0.05]
    assert torch.equal(model.weight, before)


def test_a_checkpoint_that_fails_halfway_is_none(tmp_path):
    accelerator, *_ = prepared()
    progress = {"phase": 0, "step": 1, "run": {"processes": 1}}

    def fail(folder):
        save_into(folder)
        raise OSError("disk full")

    folder = tmp_path / "step_0_1"
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(accelerator, folder, fail, progress)
    assert names(tmp_path) == set()
    with pytest.raises(OutputError, match="holds no finished checkpoint"):
        find_checkpoint("latest", tmp_path)
    save_checkpoint(accelerator, folder, save_into, progress)
    save_checkpoint(accelerator, folder, save_into, {**progress, "step": 2})  # over itself
    assert names(tmp_path) == {"step_0_1"}
    assert load_progress(folder)["step"] == 2
