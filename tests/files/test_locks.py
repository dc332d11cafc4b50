"""Of several writers of a file or folder one is at work, and its lock ends with it."""

import contextlib
import errno
import json
import os
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from collab_heads.errors import OutputError
from collab_heads.files import locks
from collab_heads.files.atomic import write_file
from collab_heads.files.locks import INSIDE, PARTIAL, WRITING, locked, sole_writer

IN_USE = "is in use by a run that is still going on"


def lock_once(folder):
    with locked(folder):
        pass


def in_thread(function, *args):
    with ThreadPoolExecutor(1) as other:
        return other.submit(function, *args).result()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_has_one_writer_and_no_lock_is_left(tmp_path):
    folder = tmp_path / "new" / "model"
    with locked(folder):
        assert names(folder.parent) == [f"model{WRITING}"]
        lock_once(folder)  # by the same thread
        lock_once(folder.with_name(f"model{PARTIAL}"))
        assert names(folder.parent) == [f"model{WRITING}"]
        with pytest.raises(OutputError, match=rf'{folder} {IN_USE} \({{"process": {os.getpid()}, .*: wait for its end'):
            in_thread(lock_once, folder)
        in_thread(lock_once, folder / "inner")
    assert names(tmp_path) == []
    in_thread(lock_once, folder)


def test_a_lock_dies_with_its_process_though_a_worker_outlives_it(tmp_path):
    folder, (read, write) = tmp_path / "model", os.pipe()
    child = os.fork()
    if not child:
        with locked(folder):
            if not (worker := os.fork()):
                signal.pause()
            os.write(write, worker.to_bytes(8, "big"))
            signal.pause()
    worker = int.from_bytes(os.read(read, 8), "big")
    try:
        with pytest.raises(OutputError, match=f'{IN_USE} .."process": {child}'):
            lock_once(folder)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert names(tmp_path) == [f"model{WRITING}"]
        lock_once(folder)
    finally:
        os.kill(worker, signal.SIGKILL)
    assert names(tmp_path) == []


def test_a_forked_child_neither_has_nor_removes_the_lock(tmp_path):
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(tmp_path / "model"))
        if not (child := os.fork()):
            refused = 1
            try:
                with contextlib.suppress(OutputError):
                    lock_once(tmp_path / "model")
                    refused = 0
                stack.close()
            finally:
                os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        assert names(tmp_path) == [f"model{WRITING}"]


@pytest.mark.parametrize("gone", ("removed", "replaced"))
def test_a_lock_that_was_removed_while_we_waited_is_not_taken(gone, tmp_path, monkeypatch):
    """Else two runs would have a lock each: on a file that is gone, and on the new one."""
    stock, taken, lock = locks.take, [], tmp_path / f"model{WRITING}"

    def take(descriptor):
        if not taken:
            lock.unlink()
            if gone == "replaced":
                lock.touch()
        taken.append(descriptor)
        stock(descriptor)

    monkeypatch.setattr(locks, "take", take)
    with locked(tmp_path / "model"):
        assert len(taken) == 2
        assert os.path.samestat(os.fstat(taken[-1]), lock.stat())


def test_a_drive_without_locks_is_said_once(tmp_path, monkeypatch, caplog):
    def take(descriptor):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks, "take", take)
    monkeypatch.setattr(locks, "without_locks", set())
    for _ in range(2):
        with locked(tmp_path / "model"), pytest.raises(OutputError, match=IN_USE):
            in_thread(lock_once, tmp_path / "model")  # within a process it holds there, too
    write_file(tmp_path / "file", b"x")
    assert caplog.text.count("cannot be locked ([Errno") == 1
    assert names(tmp_path) == ["file"]


def test_a_file_of_the_users_is_no_lock(tmp_path):
    (tmp_path / f"model{WRITING}").write_text("my notes")
    with pytest.raises(OutputError, match=r"model\.writing is in the way, and we did not write it"):
        lock_once(tmp_path / "model")
    assert (tmp_path / f"model{WRITING}").read_text() == "my notes"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become someone else")
def test_where_nothing_may_be_written_beside_a_folder_its_lock_is_inside():
    with tempfile.TemporaryDirectory() as place:  # which others may look into, as they may not into tmp_path
        folder = Path(place, "model")
        folder.mkdir()
        os.chmod(place, 0o755)
        os.chmod(folder, 0o777)
        os.seteuid(65534)
        try:
            with locked(folder):
                assert names(folder) == [INSIDE]
                with pytest.raises(OutputError, match=IN_USE):
                    in_thread(lock_once, folder)
            with pytest.raises(PermissionError):
                lock_once(Path(place, "new"))
        finally:
            os.seteuid(0)
        assert names(folder) == []


def test_writers_of_one_file_take_turns(tmp_path, monkeypatch):
    path, begun, end = tmp_path / "report.json", threading.Event(), threading.Event()

    def slowly():
        with sole_writer(tmp_path / f"report.json{PARTIAL}") as file:
            file.write(b"half of an older one, and long")
            begun.set()
            assert end.wait(20)
            os.replace(tmp_path / f"report.json{PARTIAL}", path)

    with ThreadPoolExecutor(2) as others:
        first = others.submit(slowly)
        assert begun.wait(20)
        monkeypatch.setattr(locks, "PATIENCE", 0.05)
        with pytest.raises(OutputError, match="is being written by another process"):
            write_file(path, b"new")
        assert not path.exists()
        monkeypatch.setattr(locks, "PATIENCE", 20)
        second = others.submit(write_file, path, b"newest")
        end.set()
        first.result(), second.result()
    assert path.read_bytes() == b"newest"
    assert names(tmp_path) == ["report.json"]


def test_a_file_that_many_write_is_always_that_of_one(tmp_path):
    """From threads and processes at once."""
    path = tmp_path / "report.json"

    def write(number):
        for _ in range(15):
            write_file(path, json.dumps([number] * (2000 + 500 * number)).encode())
            assert len(set(json.loads(path.read_bytes()))) == 1

    def in_threads(first):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(write, (first, first + 1)))

    if not (child := os.fork()):
        failed = 1
        try:
            in_threads(2)
            failed = 0
        finally:
            os._exit(failed)
    in_threads(0)
    assert os.waitpid(child, 0)[1] == 0
    assert names(tmp_path) == ["report.json"]
