"""What is the user's stays, whatever a run is told to do, and whatever becomes of it."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import scripts
import torch
from busy import IN_USE, busy
from later import Later, run_glue, run_translation
from safetensors.torch import load_file
from scripts import run
from translation_script import SCRATCH
from translation_script import run as translate

from collab_heads import CollabHeadsError
from collab_heads.errors import ArgumentError, OutputError
from collab_heads.files.locks import WRITING
from collab_heads.training.options import parser as flag_parser
from collab_heads.training.options import value_types
from collab_heads.training.storage.output import reserved

runs = Later("collab_heads.training.runs.run")

SHORT = ("--max_train_steps", 1, "--max_eval_samples", 5)
OVERWRITE = "--overwrite_output_dir"


def everything(folder: Path) -> dict:
    """Relative path -> content."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_runs_own_input_in_the_output_folder(bert, files, tmp_path):
    out = tmp_path / "out"
    run(bert, files, out, *SHORT)
    (out / "predictions").mkdir()
    shutil.copy(files[1], out / "predictions" / "train.csv")
    before = everything(out)
    data = ["--train_file", str(out / "predictions" / "train.csv"), *files[2:]]
    with pytest.raises(CollabHeadsError, match=r"would delete .*predictions/train.csv, which the run reads"):
        run(bert, data, out, *SHORT, OVERWRITE)
    assert everything(out) == before


def test_a_translations_input_in_the_output_folder(bilingual, tmp_path):
    """`--train_file` takes several files; one of them is there through a link."""
    out = tmp_path / "out"
    (out / "translations").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(out)
    for number, name in ((1, "src.txt"), (2, "tgt.txt")):
        shutil.copy(bilingual[number], out / "translations" / name)
    before = everything(out)
    data = ["--train_file", bilingual[1], str(tmp_path / "linked" / "translations" / "tgt.txt"), *bilingual[3:]]
    with pytest.raises(CollabHeadsError, match=r"would delete .*tgt.txt, which the run reads"):
        translate(SCRATCH, data, out, OVERWRITE)
    assert everything(out) == before


def test_folders_of_the_users_that_are_called_as_ours(bert, files, tmp_path):
    out = tmp_path / "out"
    names = ["logs/diary.txt", "best/notes.txt", "predictions/train.csv", "translations/x.txt", "thesis.txt"]
    for _ in range(2):
        for name in names:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(name)
        run(bert, files, out, *SHORT, OVERWRITE)
        assert {name: (out / name).read_text() for name in names} == {name: name for name in names}


@pytest.mark.parametrize("value, message", (("", "empty"), ("  ", "empty"), ("a\0b", "null byte")))
@pytest.mark.parametrize("flag", ("--output_dir", "--train_file", "--model_name_or_path"))
def test_empty_names(flag, value, message, bert, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=f"argument {flag}: .*{message}"):
        run(bert, files, tmp_path / "out", flag, value)
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_cannot_be_is_refused_before_anything_is_read(bert, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "below", tmp_path / ("long" * 80)):
        with pytest.raises(OutputError, match=r"--output_dir .*cannot be written to"):
            run(bert, ["--train_file", "/nowhere.csv", "--validation_file", "/nowhere.csv"], out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
@pytest.mark.parametrize("more", ((), (OVERWRITE,), ("--resume_from_checkpoint",)))
def test_a_folder_that_another_run_has(more, bert, files, tmp_path):
    run(bert, files, tmp_path / "out", *SHORT, "--checkpointing_steps", 1)
    before = everything(tmp_path / "out")
    with busy(tmp_path / "out"), pytest.raises(OutputError, match=IN_USE):
        run(bert, files, tmp_path / "out", *SHORT, "--checkpointing_steps", 1, *more)
    assert everything(tmp_path / "out") == before


def test_the_folder_is_reserved_while_the_run_goes_on(bert, files, tmp_path, monkeypatch):
    seen, stock = [], runs.Run.evaluate

    def evaluate(self, *args, **more):
        seen.append((tmp_path / f"out{WRITING}").exists())
        stock(self, *args, **more)

    monkeypatch.setattr(runs.Run, "evaluate", evaluate)
    run(bert, files, tmp_path / "out", *SHORT)
    assert seen == [True]
    assert not (tmp_path / f"out{WRITING}").exists()


@pytest.mark.slow
def test_a_folder_that_resumes_elsewhere_is_cleared_too(bert, files, tmp_path):
    """Else what an earlier run left there and what this one writes are mixed."""
    more = (*SHORT, "--checkpointing_steps", 1)
    run(bert, files, tmp_path / "one", *more)
    run(bert, files, tmp_path / "two", *more, "--with_tracking")
    resume = ("--resume_from_checkpoint", tmp_path / "one" / "step_0_1")
    run(bert, files, tmp_path / "two", *more, *resume, OVERWRITE)
    assert not (tmp_path / "two" / "logs").exists()
    assert not (tmp_path / "two" / "step_0_1").exists()


@pytest.mark.slow
def test_a_file_put_into_a_checkpoint_survives_it(bert, files, tmp_path, monkeypatch):
    out, stock = tmp_path / "out", runs.Run.record_of_run

    def record(self):
        if (out / "step_0_1").exists():
            (out / "step_0_1" / "notes.txt").write_text("mine")
        return stock(self)

    monkeypatch.setattr(runs.Run, "record_of_run", record)
    more = ("--max_train_steps", 2, "--checkpointing_steps", 1, "--save_total_limit", 1)
    run(bert, files, out, *more)
    assert everything(out / "step_0_1") == {"notes.txt": b"mine"}
    assert (out / "step_0_2" / "progress.json").exists()


@pytest.mark.slow
def test_a_run_that_goes_on_deletes_what_a_killed_one_had_yet_to_delete(bert, files, tmp_path):
    """Also if there is nothing left to train."""
    more = ("--max_train_steps", 2, "--checkpointing_steps", 1)
    run(bert, files, tmp_path / "out", *more)
    run(bert, files, tmp_path / "out", *more, "--save_total_limit", 1, "--resume_from_checkpoint")
    assert [path.name for path in (tmp_path / "out").glob("step_*")] == ["step_0_2"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ("model.staged", "step_0_2", "all_results.json"))
def test_a_disk_that_is_full(place, bert, files, tmp_path, monkeypatch):
    """A message; what was there stays, and the run can be gone on with."""
    out, stock, full = tmp_path / "out", os.fsync, True
    more = ("--max_train_steps", 2, "--checkpointing_steps", 1, "--max_eval_samples", 5)

    def sync(descriptor):
        if full and place in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        stock(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(OutputError, match=rf"cannot write {out}/{place}.* are needed, and [\d.]+ MB are free there"):
        run(bert, files, out, *more)
    assert (out / "step_0_1" / "progress.json").exists()
    assert [path.name for path in out.rglob("*.partial")] == []
    full = False
    run(bert, files, out, *more, "--resume_from_checkpoint")
    run(bert, files, tmp_path / "unbroken", *more)
    weights, expected = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "unbroken"))
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []


@pytest.mark.parametrize("script", (run_glue, run_translation))
def test_every_flag_that_names_a_file_or_a_folder_is_guarded(script, monkeypatch):
    """Its type says so: what the flags of this type name is never overwritten."""
    parsers = []
    monkeypatch.setattr(flag_parser.Parser, "parse_args", lambda self, argv=None: parsers.append(self) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        script.parse([])
    for action in parsers[0]._actions:
        names = action.metavar in ("FILE", "DIR") or "folder, or name" in (action.help or "")
        assert (action.type is value_types.path) or not names, action.dest
    guarded = {action.dest for action in parsers[0]._actions if action.type is value_types.path}
    assert {"output_dir", "train_file", "validation_file", "test_file", "model_name_or_path"} < guarded
    assert {"tokenizer_name", "alive_heads", "rotation_schedule", "analyze_treebank"} < guarded


@pytest.mark.slow
def test_two_processes_end_when_the_first_may_not_write(bert, files, tmp_path):
    """None waits for the one that refuses."""
    out = tmp_path / "out"
    with reserved(out):
        process = scripts.start([*scripts.LAUNCH, *scripts.flags(bert, files, out, *SHORT)])
        _, errors = process.communicate(timeout=240)
        assert process.returncode
        assert IN_USE in errors.decode()
        assert list(out.iterdir()) == []


@pytest.mark.slow
def test_runs_that_are_killed_end_as_unbroken_ones():
    """A dozen of the kills of the benchmark."""
    command = [sys.executable, "benchmarks/kills.py", "--kills", "12", "--seed", "1", "--trial"]
    done = subprocess.run(command, cwd=scripts.ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
