"""The output folder: what may be written to, and what may be deleted."""

import os

import pytest
import torch

from collab_heads.errors import OutputError
from collab_heads.training.output import check_output, clear_output, provenance


def contents(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_new_or_empty_folder_is_free_and_is_not_made(tmp_path):
    check_output(tmp_path / "new", overwrite=False, resume=False)
    assert not (tmp_path / "new").exists()
    check_output(tmp_path, overwrite=False, resume=False)


@pytest.mark.parametrize("name", ("thesis.txt", ".hidden"))
def test_a_folder_in_use_is_free_to_overwrite_or_to_resume_only(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(OutputError) as caught:
        check_output(tmp_path, overwrite=False, resume=False)
    for fragment in (str(tmp_path), "is in use", "--resume_from_checkpoint", "--overwrite_output_dir"):
        assert fragment in str(caught.value)
    check_output(tmp_path, overwrite=True, resume=False)
    check_output(tmp_path, overwrite=False, resume=True)
    assert contents(tmp_path) == [name]


def test_a_file_is_refused_whatever_is_asked(tmp_path):
    path = tmp_path / "out"
    path.touch()
    for overwrite, resume in ((False, False), (True, False), (False, True)):
        with pytest.raises(OutputError, match="out is a file"):
            check_output(path, overwrite=overwrite, resume=resume)


def test_clearing_deletes_what_a_run_left_and_nothing_else(tmp_path):
    ours = ["step_0_5", "step_0_10.partial", "epoch_1_2", "epoch_1_2.partial", "logs", "predictions"]
    ours += ["config.json", "all_results.json", "model.safetensors", "tokenizer.json"]
    others = ["thesis.txt", "step_0_7", "my_step_0_5", "step_0_5.old", "step_x", "logs2", "epoch_0_1_2", "CONFIG.json"]
    for name in ours + others:
        if "." in name.removesuffix(".partial"):
            (tmp_path / name).write_text("x")
        else:
            (tmp_path / name / "deep").mkdir(parents=True)
            (tmp_path / name / "deep" / "file").touch()
    for name in ("step_0_5", "epoch_1_2"):  # "step_0_7" is of some other program
        (tmp_path / name / "progress.json").touch()
    clear_output(tmp_path)
    assert contents(tmp_path) == sorted(others)
    assert (tmp_path / "logs2" / "deep" / "file").exists()


def test_clearing_what_is_not_there_does_nothing(tmp_path):
    clear_output(tmp_path / "new")
    assert contents(tmp_path) == []


def test_a_link_is_deleted_and_what_it_points_to_stays(tmp_path):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    (elsewhere / "events").touch()
    os.symlink(elsewhere, out / "logs")
    clear_output(out)
    assert contents(out) == ["logs"]  # nothing says that they are ours
    (out / "all_results.json").touch()
    clear_output(out)
    assert contents(out) == []
    assert contents(elsewhere) == ["events"]


def test_provenance_is_the_command_and_the_versions(monkeypatch):
    monkeypatch.setattr("sys.argv", ["run_glue.py", "--seed", "3"])
    found = provenance()
    assert found["command"] == "run_glue.py --seed 3"
    assert found["versions"]["torch"] == torch.__version__
    assert {"python", "transformers", "collab-heads"} < found["versions"].keys()


@pytest.mark.parametrize("flags", (["--hub_token", "hf_secret"], ["--hub_token=hf_secret"]))
def test_provenance_holds_no_secrets(flags, monkeypatch):
    monkeypatch.setattr("sys.argv", ["run_glue.py", "--push_to_hub", *flags])
    assert "hf_secret" not in str(provenance())
