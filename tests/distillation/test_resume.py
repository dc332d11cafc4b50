"""A run that was killed goes on where it was, and ends with the bits of an unbroken one."""

import json
import sys

import pytest
import torch
from crashing import Died, dies_at
from distilling import changed_pair, random_batches
from safetensors.torch import load_file
from unchanged import refused

from collab_heads import distill
from collab_heads.distillation import checkpoint as checkpoints
from collab_heads.distillation.distill import Distillation
from collab_heads.errors import OutputError

distill_module = sys.modules["collab_heads.distillation.distill"]  # the package has a function of this name
OPTIONS = {"steps": 8, "evaluate_every": 2, "checkpoint_every": 3, "learning_rate": 2e-3}


def run(output_dir=None, batches=None, dtype=torch.float32, **more):
    """A run of a fresh pair: its weights and its report."""
    model, original = (each.to(dtype) for each in changed_pair())
    report = distill(model, original, batches or random_batches(10), **{**OPTIONS, "output_dir": output_dir, **more})
    return model.state_dict(), report


def assert_same(found, expected):
    """Bit for bit, and the same history."""
    (weights, report), (expected_weights, expected_report) = found, expected
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected_weights.items())
    ours, theirs = report.to_dict(), expected_report.to_dict()
    assert ours.pop("seconds") > 0 and theirs.pop("seconds") > 0
    assert ours == theirs


@pytest.fixture
def dying(monkeypatch):
    """Let the process die before a step; None for never. Counts the steps taken."""
    stock, taken = Distillation.take_step, []

    def at(step):
        def take_step(self, progress):
            if progress.step == step:
                raise Died
            taken.append(progress.step)
            stock(self, progress)

        monkeypatch.setattr(Distillation, "take_step", take_step)
        return taken

    return at


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_killed_run_goes_on(dtype, dying, tmp_path):
    expected = run(dtype=dtype)
    taken = dying(7)
    with pytest.raises(Died):
        run(tmp_path, dtype=dtype)
    assert taken == list(range(7))
    names = {path.name for path in (tmp_path / "distillation").iterdir()}
    assert names == {"manifest.json", "progress.json", "state.safetensors"}
    assert json.loads((tmp_path / "distillation" / "progress.json").read_text())["step"] == 6
    taken.clear()
    dying(None)
    assert_same(run(tmp_path, dtype=dtype), expected)
    assert taken == [6, 7]
    assert list(tmp_path.iterdir()) == []


def test_it_goes_on_with_the_threads_that_it_began_with(two_threads, dying, tmp_path, monkeypatch):
    """Those of a busy machine, though it is busy no longer."""
    monkeypatch.setattr(distill_module, "choose_threads", lambda *_: torch.set_num_threads(1))
    expected = run()
    assert torch.get_num_threads() == 2
    dying(7)
    with pytest.raises(Died):
        run(tmp_path)
    assert torch.get_num_threads() == 2
    assert json.loads((tmp_path / "distillation" / "progress.json").read_text())["threads"] == 1
    dying(None)
    monkeypatch.setattr(distill_module, "choose_threads", None)
    assert_same(run(tmp_path), expected)


@pytest.mark.slow
def test_a_run_that_is_not_killed_leaves_nothing_but_what_was_there(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    expected = run()
    assert_same(run(tmp_path), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def dies_everywhere(tmp_path, places):
    """Die before an operation on files, go on, and compare; returns whether the last place was beyond the end."""
    expected, died = run(), True
    for number in places:
        folder = tmp_path / str(number)
        died = dies_at(number, lambda folder=folder: run(folder))
        if died:
            assert_same(run(folder), expected)
        assert not any(folder.rglob("*"))
    return not died


@pytest.mark.slow
def test_it_may_die_while_it_writes(tmp_path):
    assert not dies_everywhere(tmp_path, (1, 7, 20, 33))


@pytest.mark.slow
def test_it_may_die_at_any_operation_on_files(tmp_path):
    assert dies_everywhere(tmp_path, range(0, 400, 3)) and dies_everywhere(tmp_path / "more", range(1, 400, 7))


@pytest.fixture
def checkpoint(dying, tmp_path):
    """An output folder with the checkpoint of a run that died."""
    dying(5)
    with pytest.raises(Died):
        run(tmp_path)
    dying(None)
    return tmp_path


OTHERS = {
    "steps": ({"steps": 9}, "steps was 8 and is 9"),
    "rate": ({"learning_rate": 1e-3}, "learning_rate was 0.002 and is 0.001"),
    "seed": ({"seed": 1}, "seed was 0 and is 1"),
    "precision": ({"mixed_precision": "bf16"}, "mixed_precision was 'no' and is 'bf16'"),
    "batches": ({"batches": random_batches(10, seed=6)}, "batches was '"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_checkpoint_of_another_run(kind, checkpoint):
    more, said = OTHERS[kind]
    model, original = changed_pair()
    options = {**OPTIONS, "output_dir": checkpoint, "batches": random_batches(10), **more}
    with refused(model, OutputError, "is of another run", said, "delete"):
        distill(model, original, **options)
    assert (checkpoint / "distillation" / "state.safetensors").exists()


@pytest.mark.parametrize("which", (0, 1))
def test_a_checkpoint_of_another_model(which, checkpoint):
    models = changed_pair()
    models[which].classifier.weight.data[0, 0] += 1
    with refused(models[0], OutputError, f"{('model', 'original')[which]} was '"):
        distill(*models, random_batches(10), output_dir=checkpoint, **OPTIONS)


def cut_short(folder):
    content = (folder / "state.safetensors").read_bytes()
    (folder / "state.safetensors").write_bytes(content[:-1])


def older(folder):
    record = json.loads((folder / "progress.json").read_text())
    (folder / "progress.json").write_text(json.dumps({**record, "format": 1}))


def foreign(folder):
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize(
    "damage, said",
    (
        (cut_short, "state.safetensors has"),
        (foreign, "lacks manifest.json"),
        (older, "is of format 1, and this version resumes format 3 only"),
    ),
)
def test_a_checkpoint_that_is_damaged_older_or_none_of_ours(damage, said, checkpoint):
    damage(checkpoint / "distillation")
    model, original = changed_pair()
    with refused(model, OutputError, said, "delete"):
        distill(model, original, random_batches(10), output_dir=checkpoint, **OPTIONS)


def test_the_threads_of_a_checkpoint_are_checked():
    """Strangers can write its manifest, too."""
    with pytest.raises(ValueError, match="threads is 1000000, not a number from 1 to 4,096"):
        checkpoints.Progress.from_dict({**checkpoints.Progress().to_dict(), "threads": 10**6}, {})


def test_a_checkpoint_holds_tensors_and_json_only(checkpoint):
    tensors = load_file(checkpoint / "distillation" / "state.safetensors")
    assert {name.split("/")[0] for name in tensors} == {"weight", "step", "exp_avg", "exp_avg_sq", "best"}
    progress = json.loads((checkpoint / "distillation" / "progress.json").read_text())
    assert progress["step"] == 3 and progress["run"]["steps"] == 8 and len(progress["history"]) == 2


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_deleted_is_told_and_nothing_is_lost(monkeypatch, tmp_path, caplog):
    def fails(folder):
        raise OutputError(f"{folder} cannot be written: read-only")

    expected = run()
    monkeypatch.setattr(checkpoints, "retire", fails)
    assert_same(run(tmp_path), expected)
    assert "its checkpoint stays" in caplog.text and "read-only" in caplog.text
