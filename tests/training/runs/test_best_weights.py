"""Which checkpoints are averaged, and what their mean is."""

import json
from argparse import Namespace

import pytest
import torch
import translation_models as tiny
from later import Later

import collab_heads
from collab_heads.errors import OutputError
from collab_heads.files.checkpoint import FORMAT
from collab_heads.files.folders import write_folder
from collab_heads.training.loop.steps import TrainingSteps

best_weights = Later("collab_heads.training.runs.best_weights")


RUN = {"processes": 1}


@pytest.fixture
def folder(tmp_path):
    """Two phases, and what is not a checkpoint."""
    for name, phase, step in (
        *((f"step_{phase}_{step}", phase, step) for phase, step in ((0, 2), (0, 4), (0, 6), (0, 10), (1, 2), (1, 10))),
        ("epoch_0_1", 0, 4),
        ("epoch_0_2", 0, 7),
    ):
        checkpoint(tmp_path / name, phase, step)
    (tmp_path / "step_1_12.partial").mkdir()
    (tmp_path / "best").mkdir()
    return tmp_path


def checkpoint(path, phase, step, run=RUN):
    def fill(place):
        progress = {"phase": phase, "step": step, "run": run, "format": FORMAT}
        (place / "progress.json").write_text(json.dumps(progress))
        for name in ("config.json", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
            (place / name).touch()

    write_folder(path, fill)


def last(folder, count, *, phase=0, every=2, total=6, until=None):
    """The names, of a training whose epochs have four steps."""
    args = Namespace(output_dir=folder, average_checkpoints=count, checkpointing_steps=every)
    steps = TrainingSteps(lambda epoch: [[[0]]] * 4, 0, total)
    return [path.name for path in best_weights.last_checkpoints(args, phase, steps, RUN, until)]


def test_the_last_that_a_training_writes(folder):
    """Later ones may be there, of a run that was killed; more of the steps may be to come."""
    assert last(folder, 2) == ["step_0_4", "step_0_6"]
    assert last(folder, 1, phase=1, every=10, total=10) == ["step_1_10"]
    assert last(folder, 2, every="epoch", total=7) == ["epoch_0_1", "epoch_0_2"]
    assert last(folder, 3, total=8, until=6) == ["step_0_4", "step_0_6"]
    assert last(folder, 2, every="epoch", total=12, until=7) == []


def test_no_other_checkpoint_stands_in(folder):
    for options, message in (
        ({"count": 3, "total": 10}, "step_0_8"),
        ({"count": 3, "phase": 1}, "step_1_4"),
        ({"count": 1, "every": "epoch", "total": 12}, "epoch_0_3"),
    ):
        with pytest.raises(OutputError, match=f"--average_checkpoints {options['count']}: .*{message}"):
            last(folder, **options)
    checkpoint(folder / "step_0_4", 0, 4, {"processes": 1, "seed": 7})
    with pytest.raises(OutputError, match="step_0_4 is of another run: seed was 7"):
        last(folder, 2)
    (folder / "step_0_6" / "config.json").write_text("{}")
    with pytest.raises(OutputError, match="step_0_6 is damaged"):
        last(folder, 1)


def test_the_mean_is_taken_in_double_precision(tmp_path):
    """Three models whose mean in float32 would depend on the order."""
    folders, states = [tmp_path / str(i) for i in range(3)], []
    for seed, path in enumerate(folders):
        model = tiny.model("marian")
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.normal_(std=10.0**seed)
        write_folder(path, model.save_pretrained)
        states.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    model = tiny.model("marian")
    positions = model.model.encoder.embed_positions.weight.clone()
    best_weights.load_weights(model, folders)
    for name, parameter in model.named_parameters():
        if "embed_positions" not in name:
            mean = torch.stack([state[name].double() for state in states]).mean(0)
            assert torch.equal(parameter, mean.float())
    assert torch.equal(model.model.encoder.embed_positions.weight, positions)  # never stored
    best_weights.load_weights(model, folders[:1])
    assert torch.equal(model.model.encoder.layers[0].fc1.weight, states[0]["model.encoder.layers.0.fc1.weight"])


def test_weights_of_another_model_are_refused(tmp_path):
    model, other = tiny.model("marian"), tiny.model("marian")
    collab_heads.swap_to_collaborative(other, dim_value=4)
    write_folder(tmp_path / "other", other.save_pretrained)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(OutputError, match=r"other holds another model: its .* has another shape"):
        best_weights.load_weights(model, [tmp_path / "other"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
