"""Files that are whole or not there."""

import errno
import os

import pytest
from crashing import dies_at
from safetensors import SafetensorError

from collab_heads.errors import OutputError
from collab_heads.files.atomic import write_file, write_json, writing


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_in_a_new_folder_and_replaced(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    assert write_file(path, b"one") == path
    write_file(str(path), b"two")
    assert path.read_bytes() == b"two"
    assert names(path.parent) == ["file"]


def test_killed_at_any_operation_the_old_or_the_new_file_is_there(tmp_path):
    path, found = tmp_path / "file", set()
    for number in range(100):
        write_file(path, b"old")
        died = dies_at(number, lambda: write_file(path, b"new"))
        found.add(path.read_bytes())
        assert path.read_bytes() in (b"old", b"new")
        if not died:
            break
    assert number > 2
    assert found == {b"old", b"new"}
    write_file(path, b"new")
    assert names(tmp_path) == ["file"]  # the next writer takes the leftover along


def test_a_file_is_on_disk_before_it_is_renamed(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        stock = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, stock=stock: (done.append(name), stock(*args)))
    write_file(tmp_path / "file", b"x")
    assert done == ["fsync", "replace", "fsync"]


FAILURES = {  # what a full disk looks like
    "linux": OSError(errno.ENOSPC, "No space left on device"),
    "quota": OSError(errno.EDQUOT, "Disk quota exceeded"),
    "safetensors": SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    "tokenizers": Exception("No space left on device (os error 28)"),
    "torch": RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 1024 vs 960"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_full_disk_is_a_message_with_path_and_bytes(kind, tmp_path):
    with pytest.raises(OutputError) as caught, writing(tmp_path / "new" / "file", 2_500_000):
        raise FAILURES[kind]
    for fragment in ("cannot write", str(tmp_path / "new" / "file"), "full", "about 2.5 MB are needed", "MB are free"):
        assert fragment in str(caught.value)


@pytest.mark.parametrize("number", (5, 13, 30, 121))
def test_any_failure_to_write_is_one_of_ours(number, tmp_path):
    """Also those that come from Rust, with a number that is not that of a full disk."""
    said = f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})"
    for error in (SafetensorError(said), Exception(said), OSError(number, os.strerror(number))):
        with pytest.raises(OutputError, match=f"cannot write {tmp_path / 'file'}: .*{os.strerror(number)}") as caught:
            with writing(tmp_path / "file"):
                raise error
        assert "full" not in str(caught.value)


def test_no_file_takes_the_place_of_a_pipe_or_a_device(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.symlink("/dev/null", tmp_path / "link")
    for name in ("pipe", "link"):
        with pytest.raises(OutputError, match=f"{name} is a device or a pipe, which a file would replace"):
            write_file(tmp_path / name, b"x")
    assert names(tmp_path) == ["link", "pipe"]


def test_other_errors_pass(tmp_path):
    for error in (RuntimeError("shapes differ"), KeyError("x"), OutputError("ours")):
        with pytest.raises(type(error)) as caught, writing(tmp_path / "file"):
            raise error
        assert caught.value is error


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path, monkeypatch):
    path = write_json(tmp_path / "file", {"a": 1})
    before = path.read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=f"cannot write {path}: the disk"):
        write_json(path, {"a": 2})
    assert path.read_bytes() == before
    assert names(tmp_path) == ["file"]
