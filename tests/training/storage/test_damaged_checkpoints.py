"""A checkpoint that is damaged is seen, and a run goes on from one that is whole."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from scripts import run

from collab_heads import CollabHeadsError
from collab_heads.files.folders import digest, read_manifest, write_manifest

STEPS = ("--max_train_steps", 3, "--checkpointing_steps", 1, "--max_eval_samples", 5)
RESUME = "--resume_from_checkpoint"


@pytest.fixture(scope="module")
def finished(bert, files, tmp_path_factory):
    """A run with three checkpoints."""
    out = tmp_path_factory.mktemp("finished") / "out"
    run(bert, files, out, *STEPS)
    return out


@pytest.fixture
def out(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "out")


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def of_another_step(path):
    shutil.copy(path.parents[1] / "step_0_1" / path.name, path)


def one_bit(path):
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(bytes(content))


DAMAGE = {
    "cut random states": ("random_states_0.pkl", cut),
    "empty random states": ("random_states_0.pkl", lambda path: path.write_bytes(b"")),
    "cut optimizer": ("optimizer.bin", cut),
    "another optimizer": ("optimizer.bin", of_another_step),
    "another scheduler": ("scheduler.bin", of_another_step),
    "another model": ("model.safetensors", of_another_step),
    "cut model": ("model.safetensors", cut),
    "a bit of the model": ("model.safetensors", one_bit),
    "no tokenizer": ("tokenizer.json", lambda path: path.unlink()),
    "another progress": ("progress.json", of_another_step),
    "broken progress": ("progress.json", cut),
    "cut manifest": ("manifest.json", cut),
    "no manifest": ("manifest.json", lambda path: path.unlink()),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_with_its_file_and_another_is_offered(kind, bert, files, out):
    name, spoil = DAMAGE[kind]
    spoil(out / "step_0_3" / name)
    with pytest.raises(CollabHeadsError) as caught:
        run(bert, files, out, *STEPS, RESUME, out / "step_0_3")
    for fragment in (str(out / "step_0_3"), name, f"whole: {RESUME} {out / 'step_0_2'}"):
        assert fragment in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("cut random states", "another optimizer", "broken progress"))
def test_the_newest_whole_checkpoint_is_taken_and_that_is_said(kind, bert, files, out, capsys, caplog):
    expected = load_file(out / "model.safetensors")
    name, spoil = DAMAGE[kind]
    for step in (2, 3):
        spoil(out / f"step_0_{step}" / name)
    run(bert, files, out, *STEPS, RESUME)
    for step in (2, 3):
        assert any(str(out / f"step_0_{step}") in text and name in text for text in caplog.messages)
    assert f"resuming from {out / 'step_0_1'}, the newest that is whole" in caplog.text
    assert f"resuming from {out / 'step_0_1'}" in capsys.readouterr().out
    weights = load_file(out / "model.safetensors")
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []


def test_where_none_is_whole_all_are_named(bert, files, out):
    for step in (1, 2, 3):
        cut(out / f"step_0_{step}" / "optimizer.bin")
    with pytest.raises(CollabHeadsError, match="holds no finished checkpoint") as caught:
        run(bert, files, out, *STEPS, RESUME)
    assert all(f"step_0_{step} is damaged: optimizer.bin has" in str(caught.value) for step in (1, 2, 3))
    assert "--overwrite_output_dir" in str(caught.value)


@pytest.mark.parametrize("version", (None, 1, 2))
def test_a_checkpoint_of_another_format_is_refused(version, bert, files, out):
    path = out / "step_0_2" / "progress.json"
    progress = json.loads(path.read_text())
    del progress["format"]
    path.write_text(json.dumps(progress if version is None else progress | {"format": version}))
    with pytest.raises(CollabHeadsError, match=f"is of format {version}, and this version resumes format 3 only"):
        run(bert, files, out, *STEPS, RESUME, out / "step_0_2")


@pytest.mark.parametrize(
    "change, message",
    (
        ({"step": 10**400}, "'step' is not between"),
        ({"step": 10**9}, "is of step 1000000000 of phase 0, which this run does not have"),
        ({"step": -1}, "'step' is not between"),
        ({"step": "2"}, "step is str, not int"),
        ({"step": True}, "step is bool, not int"),
        ({"step": 2.0}, "step is float, not int"),
        ({"phase": 10**9}, "'phase' is not between"),
        ({"phase": 7}, "is of step 2 of phase 7, which this run does not have"),
        ({"phase": None}, "phase is null, not int"),
        ({"run": {"processes": 10**9}}, "'processes' is not between"),
        ({"run": {"processes": 0}}, "'processes' is not between"),
        ({"run": []}, "run is list, not dict"),
        ({"history": {}}, "history is dict, not list"),
        ({"history": [3]}, r"history\[0\] is int"),
        ({"history": [{"stage": "x"}]}, r"history\[0\] is without epoch, metrics, step"),
        ({"history": [{"stage": 1, "epoch": 1, "step": 1, "metrics": {}}]}, r"history\[0\].stage is int, not str"),
        ({"history": [{"stage": "x", "epoch": 1, "step": 1, "metrics": {}}]}, r"history\[0\].metrics are no numbers"),
        ({"history": [{"stage": "x", "epoch": 1, "step": 1, "metrics": {"f1": "1"}}]}, "metrics are no numbers: {'f1'"),
        ({"trained": [None]}, r"trained\[0\] is null"),
        ({"heads": None}, "heads is null, not dict"),
    ),
)
def test_progress_that_cannot_be(change, message, bert, files, out):
    path = out / "step_0_2" / "progress.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    manifest = read_manifest(path.parent)
    write_manifest(path.parent, manifest["files"] | {path.name: digest(path)})
    with pytest.raises(CollabHeadsError, match=message):
        run(bert, files, out, *STEPS, RESUME, out / "step_0_2")


@pytest.mark.parametrize(
    "text", ("[" * 100_000, '{"step": ' + "9" * 5000 + "}", "\ud800".encode(errors="surrogatepass"))
)
def test_progress_that_is_no_json(text, bert, files, out):
    (out / "step_0_2" / "progress.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CollabHeadsError, match=r"no valid progress.json"):
        run(bert, files, out, *STEPS, RESUME, out / "step_0_2")
