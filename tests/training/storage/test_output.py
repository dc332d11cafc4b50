"""The output folder: what may be written to, what may be replaced, and what may be deleted."""

import json
import os

import pytest
import torch
from crashing import dies_at

from collab_heads.errors import OutputError
from collab_heads.folders import write_folder
from collab_heads.training.runs.provenance import provenance
from collab_heads.training.storage.output import Output
from collab_heads.training.storage.output_checks import check_output
from collab_heads.training.storage.reservation import LOCK


def contents(folder):
    return sorted(path.name for path in folder.iterdir())


def texts(folder):
    """Relative path -> text, of every file that is no manifest."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def writer(**files):
    def fill(folder):
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)

    return fill


OLD = writer(config__json="old", model__safetensors="old weights", merges__txt="old merges")
NEW = writer(config__json="new", model__safetensors="new weights", tokenizer__json="new tokenizer")


@pytest.fixture
def output(tmp_path):
    """What a run leaves."""
    output = Output(tmp_path / "out")
    output.path.mkdir()
    output.save()
    output.write("translations/validation.txt", b"ours")
    write_folder(output.path / "step_0_5", writer(progress__json="{}", config__json="step"))
    output.write_folder("best", writer(config__json="best"))
    (output.path / "logs" / "glue").mkdir(parents=True)
    (output.path / "logs" / "glue" / "own.txt").write_text("mine")
    output.note_logs(lambda: (output.path / "logs" / "glue" / "events").write_text("1"))
    (output.path / "logs" / "glue" / "events").write_text("1 2")  # they grow
    output.write_model(OLD)
    output.write("all_results.json", b"{}")
    return output


def again(output):
    """As the next run sees it."""
    return Output(output.path)


def test_a_new_or_empty_folder_is_free_and_is_not_made(tmp_path):
    check_output(Output(tmp_path / "new"), overwrite=False, resume=False)
    assert not (tmp_path / "new").exists()
    (tmp_path / LOCK).touch()  # of this run
    check_output(Output(tmp_path), overwrite=False, resume=False)


@pytest.mark.parametrize("name", ("thesis.txt", ".hidden"))
def test_a_folder_in_use_is_free_to_overwrite_or_to_resume_only(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(OutputError) as caught:
        check_output(Output(tmp_path), overwrite=False, resume=False)
    for fragment in (str(tmp_path), "is in use", "--resume_from_checkpoint", "--overwrite_output_dir"):
        assert fragment in str(caught.value)
    check_output(Output(tmp_path), overwrite=True, resume=False)
    check_output(Output(tmp_path), overwrite=False, resume=True)
    assert contents(tmp_path) == [name]


def test_a_file_is_refused_whatever_is_asked(tmp_path):
    path = tmp_path / "out"
    path.touch()
    for overwrite, resume in ((False, False), (True, False), (False, True)):
        with pytest.raises(OutputError, match="out is a file"):
            check_output(Output(path), overwrite=overwrite, resume=resume)


def test_clearing_deletes_what_a_run_left_and_nothing_else(output):
    mine = {
        "thesis.txt": "x",
        "translations/mine.txt": "x",
        "predictions/train.csv": "x",
        "best/notes.txt": "x",
        "step_0_5/notes.txt": "x",
        "step_0_7/file": "x",  # of some other program
        "epoch_1_2.partial/file": "x",
        "logs/other/events": "x",
        "logs/glue/own.txt": "mine",
    }
    for name, text in mine.items():
        (output.path / name).parent.mkdir(parents=True, exist_ok=True)
        (output.path / name).write_text(text)
    output = again(output)
    check_output(output, overwrite=True, resume=False)
    output.recover()
    output.clear()
    assert texts(output.path) == mine


def test_a_folder_without_a_manifest_is_not_cleared(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "diary.txt").write_text("mine")
    (tmp_path / "thesis.txt").write_text("mine")
    check_output(Output(tmp_path), overwrite=True, resume=False)
    Output(tmp_path).clear()
    assert texts(tmp_path) == {"logs/diary.txt": "mine", "thesis.txt": "mine"}


@pytest.mark.parametrize(
    "name",
    (
        "config.json",
        "all_results.json",
        "tokenizer.json",
        "all_results.json.partial",
        "best/config.json",
        "model.staged/config.json",
        "translations",
    ),
)
def test_what_we_did_not_write_is_not_replaced(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(OutputError, match=f"holds {name}: a run would write there, and no manifest.json says"):
        check_output(Output(tmp_path), overwrite=True, resume=False)


def test_checkpoints_from_before_there_were_manifests_are_not_mistaken(tmp_path):
    (tmp_path / "step_0_5").mkdir()
    (tmp_path / "step_0_5" / "progress.json").write_text("{}")
    with pytest.raises(OutputError, match="holds step_0_5, of a run that kept no manifest"):
        check_output(Output(tmp_path), overwrite=True, resume=False)
    check_output(Output(tmp_path), overwrite=False, resume=True)


@pytest.mark.parametrize("resume", (True, False))
def test_what_was_changed_since_is_not_replaced(resume, output):
    check_output(again(output), overwrite=not resume, resume=resume)
    (output.path / "model.safetensors").write_text("other weights")
    with pytest.raises(OutputError, match=r"holds model\.safetensors: a run would write there"):
        check_output(again(output), overwrite=not resume, resume=resume)


def test_a_changed_file_is_not_deleted(output):
    (output.path / "translations" / "validation.txt").write_text("corrected by hand")
    check_output(again(output), overwrite=True, resume=False)
    again(output).clear()
    assert texts(output.path / "translations") == {"validation.txt": "corrected by hand"}
    Output(output.path).write("translations/validation.txt", b"new")
    assert texts(output.path / "translations") == {
        "validation.txt": "new",
        "validation.txt.kept": "corrected by hand",
    }


def inputs_of(tmp_path):
    """Name -> a path of something in the output folder."""
    out = tmp_path / "out"
    (out / "translations" / "src.txt").write_text("mine")
    (tmp_path / "link.txt").symlink_to(out / "translations" / "src.txt")
    (tmp_path / "linked").symlink_to(out)
    (tmp_path / "elsewhere.txt").write_text("mine")
    (out / "inner.txt").symlink_to(tmp_path / "elsewhere.txt")
    return {
        "file": out / "translations" / "src.txt",
        "dots": tmp_path / "out" / "best" / ".." / "translations" / "src.txt",
        "link": tmp_path / "link.txt",
        "linked folder": tmp_path / "linked" / "translations" / "src.txt",
        "link inside": out / "inner.txt",
        "itself": out,
        "checkpoint": out / "step_0_5",
    }


@pytest.mark.parametrize("kind", ("file", "dots", "link", "linked folder", "link inside", "itself", "checkpoint"))
def test_what_the_run_reads_is_not_overwritten(kind, output, tmp_path):
    path = str(inputs_of(tmp_path)[kind])
    with pytest.raises(OutputError, match=f"--overwrite_output_dir would delete {path}, which the run reads"):
        check_output(again(output), overwrite=True, resume=False, inputs=["bert-base-uncased", path])
    check_output(
        again(output), overwrite=True, resume=False, inputs=["bert-base-uncased", str(tmp_path / "elsewhere.txt")]
    )


def test_what_is_written_through_a_link_is_not_read_from(tmp_path):
    """The user has put one of our folders elsewhere."""
    (tmp_path / "out").mkdir()
    (tmp_path / "big_disk").mkdir()
    (tmp_path / "out" / "translations").symlink_to(tmp_path / "big_disk")
    output = Output(tmp_path / "out")
    output.write("translations/validation.txt", b"ours")
    with pytest.raises(OutputError, match="which the run reads"):
        check_output(
            again(output), overwrite=True, resume=False, inputs=[str(tmp_path / "big_disk" / "validation.txt")]
        )


def model_files(output):
    names = ("config.json", "model.safetensors", "merges.txt", "tokenizer.json")
    return {name: (output.path / name).read_text() for name in names if (output.path / name).exists()}


def loads(output):
    """What a reader would load: nothing without a config."""
    files = model_files(output)
    return (files["config.json"], files.get("model.safetensors")) if "config.json" in files else None


@pytest.fixture
def no_sync(monkeypatch):
    """Only the order of operations counts here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.usefixtures("no_sync")
def test_killed_at_any_operation_the_old_model_loads_or_the_new_one_or_none(tmp_path):
    seen = []
    for number in range(200):
        output = Output(tmp_path / str(number))
        output.path.mkdir()
        output.write_model(OLD)
        output.write("all_results.json", b"{}")
        died = dies_at(number, lambda output=output: output.write_model(NEW))
        assert loads(output) in (("old", "old weights"), ("new", "new weights"), None)
        seen.append(loads(output))
        for operation in range(60):  # and killed while it is put right
            if not dies_at(operation, lambda output=output: again(output).recover()):
                break
            assert loads(output) in (("old", "old weights"), ("new", "new weights"), None)
        again(output).recover()
        old = {"config.json": "old", "model.safetensors": "old weights", "merges.txt": "old merges"}
        new = {"config.json": "new", "model.safetensors": "new weights", "tokenizer.json": "new tokenizer"}
        assert model_files(output) in (old, new)
        assert contents(output.path) == sorted([*model_files(output), "all_results.json", "manifest.json"])
        check_output(again(output), overwrite=True, resume=False)
        check_output(again(output), overwrite=False, resume=True)
        if not died:
            break
    assert {*seen} == {("old", "old weights"), ("new", "new weights"), None}


@pytest.mark.usefixtures("no_sync")
def test_killed_at_any_operation_nothing_of_ours_is_taken_for_the_users(tmp_path):
    """A file that is replaced; and clearing, which the next run finishes."""
    for number in range(200):
        output = Output(tmp_path / str(number))
        output.path.mkdir()

        def run(output=output):
            output.save()
            output.write("translations/a.txt", b"one")
            output.write("translations/a.txt", b"two")
            output.write_folder("best", OLD)
            output.write_model(OLD)
            output.write("all_results.json", b"{}")
            output.clear()

        died = dies_at(number, run)
        left = again(output)
        check_output(left, overwrite=True, resume=False)
        left.recover()
        left.clear()
        assert set(contents(output.path)) <= {"manifest.json"}
        if not died:
            break
    assert number > 50


def test_a_model_that_we_did_not_write_is_kept_when_it_comes_while_training(tmp_path, caplog):
    output = Output(tmp_path)
    (tmp_path / "config.json").write_text("mine")
    output.write_model(NEW)
    assert texts(tmp_path)["config.json.kept"] == "mine"
    assert loads(output) == ("new", "new weights")
    assert "config.json was there, and we did not write it" in caplog.text


def test_a_link_and_what_it_points_to_stay(tmp_path):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    (elsewhere / "events").write_text("mine")
    os.symlink(elsewhere, out / "logs")
    output = Output(out)
    output.write("all_results.json", b"{}")
    again(output).clear()
    assert contents(out) == ["logs", "manifest.json"]
    assert contents(elsewhere) == ["events"]


def test_the_record_is_json_that_names_files_and_digests(output):
    record = json.loads((output.path / "manifest.json").read_text())
    assert record["model"] == ["config.json", "merges.txt", "model.safetensors"]
    assert record["files"]["all_results.json"][-1]["bytes"] == 2
    assert record["files"]["logs/glue/events"] is None


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
