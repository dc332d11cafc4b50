"""An output folder belongs to one run at a time, and can be written to."""

import contextlib
import errno
import os
import re
import signal
import tempfile
from pathlib import Path

import pytest

from collab_heads.errors import OutputError
from collab_heads.training.storage import reservation
from collab_heads.training.storage.reservation import LOCK, reserved


def test_a_folder_is_made_and_an_empty_one_is_removed(tmp_path):
    with reserved(tmp_path / "new" / "deep"):
        assert [path.name for path in (tmp_path / "new" / "deep").iterdir()] == [LOCK]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    with reserved(tmp_path / "there"):
        pass
    assert (tmp_path / "there").is_dir()
    with reserved(tmp_path / "used" / "deep"):
        (tmp_path / "used" / "deep" / "file").touch()
    assert [path.name for path in (tmp_path / "used" / "deep").iterdir()] == ["file"]


def test_two_runs_cannot_have_one_folder(tmp_path):
    with reserved(tmp_path):
        message = rf"{tmp_path} is in use by a run that is still going on .*\"process\": {os.getpid()}"
        with pytest.raises(OutputError, match=message), reserved(tmp_path):
            pass
        with pytest.raises(OutputError, match="is in use by a run"), reserved(tmp_path):
            pass
    with reserved(tmp_path):
        pass


def test_the_lock_dies_with_its_process(tmp_path):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with reserved(tmp_path):
            if not (worker := os.fork()):  # it outlives the run
                signal.pause()
            os.write(write, worker.to_bytes(8, "big"))
            signal.pause()
    worker = int.from_bytes(os.read(read, 8), "big")
    with pytest.raises(OutputError, match="is in use by a run"), reserved(tmp_path):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / LOCK).exists()
    try:
        with reserved(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_removed_while_we_waited_is_not_taken(tmp_path, monkeypatch):
    """Else two runs would have a lock each: on a file that is gone, and on the new one."""
    stock, taken = reservation.take, []

    def take(descriptor):
        if not taken:
            (tmp_path / LOCK).unlink()
        taken.append(descriptor)
        stock(descriptor)

    monkeypatch.setattr(reservation, "take", take)
    with reserved(tmp_path):
        assert len(taken) == 2
        assert os.path.samestat(os.fstat(taken[-1]), (tmp_path / LOCK).stat())


@pytest.mark.parametrize(
    "name, message",
    (
        ("file/below", "Not a directory"),
        ("file/far/below", "Not a directory"),
        ("file", "file is a file"),
        ("null\0byte", "embedded null"),
        ("long" * 80, "File name too long"),
        ("/".join(["deep" * 50] * 25), "File name too long"),
    ),
)
def test_what_cannot_be_a_folder(name, message, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match=f"--output_dir .*{re.escape(message)}"), reserved(tmp_path / name):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


@contextlib.contextmanager
def nobody():
    """Root may write anywhere: be someone who may not."""
    if os.getuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("name", (".", "new", "deep/new"))
def test_a_folder_that_may_not_be_written_to(name):
    message = "cannot be written to: Permission denied"
    with tempfile.TemporaryDirectory() as place:  # which others may look into, as they may not into tmp_path
        folder = Path(place)
        folder.chmod(0o555)
        with nobody(), pytest.raises(OutputError, match=message), reserved(folder / name):
            pass
        assert list(folder.iterdir()) == []
        folder.chmod(0o755)
        with nobody() if os.getuid() else contextlib.nullcontext(), reserved(folder / name):
            pass


def test_a_drive_without_locks_is_said(tmp_path, monkeypatch, caplog):
    def take(descriptor):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(reservation, "take", take)
    with reserved(tmp_path):
        assert f"{tmp_path} cannot be locked" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_found_before_the_run(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="cannot be written to: the disk"), reserved(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []
