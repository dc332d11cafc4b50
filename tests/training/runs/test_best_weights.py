"""Which checkpoints are averaged, and what their mean is."""

import json

import pytest
import torch
import translation_models as tiny
from later import Later

from collab_heads.errors import OutputError
from collab_heads.files.checkpoint import FORMAT

best_weights = Later("collab_heads.training.runs.best_weights")


@pytest.fixture
def folder(tmp_path):
    """Two phases, and what is not a checkpoint."""
    for phase, step in ((0, 2), (0, 4), (0, 10), (1, 2), (1, 10)):
        (tmp_path / f"step_{phase}_{step}").mkdir()
        progress = {"phase": phase, "step": step, "run": {"processes": 1}, "format": FORMAT}
        (tmp_path / f"step_{phase}_{step}" / "progress.json").write_text(json.dumps(progress))
        for name in ("config.json", "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "manifest.json"):
            (tmp_path / f"step_{phase}_{step}" / name).touch()
    (tmp_path / "step_1_12.partial").mkdir()
    (tmp_path / "best").mkdir()
    return tmp_path


@pytest.mark.parametrize("phase, count, names", ((0, 2, ["4", "10"]), (0, 3, ["2", "4", "10"]), (1, 1, ["10"])))
def test_the_last_of_a_phase_in_the_order_of_their_steps(phase, count, names, folder):
    found = best_weights.last_checkpoints(folder, phase, count)
    assert [path.name for path in found] == [f"step_{phase}_{name}" for name in names]


def test_another_phase_does_not_stand_in(folder):
    with pytest.raises(OutputError, match=f"--average_checkpoints 3: {folder} holds 2 of this phase"):
        best_weights.last_checkpoints(folder, 1, 3)


def test_the_mean_is_taken_in_double_precision(tmp_path):
    """Three models whose mean in float32 would depend on the order."""
    folders, states = [tmp_path / str(i) for i in range(3)], []
    for seed, path in enumerate(folders):
        model = tiny.model("marian")
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.normal_(std=10.0**seed)
        model.save_pretrained(path)
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
