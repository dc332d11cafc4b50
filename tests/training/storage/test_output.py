"""The output folder: what is written, what may be deleted, and what a kill leaves."""

import json
import os

import pytest
from crashing import dies_at
from written_output import NEW, OLD, again, contents, texts

from collab_heads.training.storage.output import Output, check_output


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


@pytest.mark.slow
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
