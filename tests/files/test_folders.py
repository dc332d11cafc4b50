"""Folders that are whole or not there, and what of them may be deleted."""

import errno
import json
import os

import pytest
from crashing import dies_at

from collab_heads.errors import OutputError
from collab_heads.files import folders
from collab_heads.files.folders import MANIFEST, begin, damage, is_ours, read_manifest, recover, retire, write_folder

ONE, TWO = {"model": "1" * 9, "deep/er/file": "one"}, {"model": "2", "tokenizer": "two"}


def fill(files):
    def write(folder):
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    return write


def files_in(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and path.name != MANIFEST
    }


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path / "best", fill(ONE))
    return tmp_path / "best"


def test_a_folder_has_a_manifest_and_is_whole(folder):
    assert files_in(folder) == ONE
    assert read_manifest(folder)["files"].keys() == ONE.keys()
    assert read_manifest(folder)["files"]["model"]["bytes"] == 9
    assert damage(folder) is None
    assert names(folder.parent) == ["best"]


@pytest.fixture
def no_sync(monkeypatch):
    """Only the order of operations counts here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("replaced", (True, False))
def test_killed_at_any_operation_the_old_or_the_new_folder_is_recovered(replaced, tmp_path):
    ends = []
    for number in range(200):
        folder = tmp_path / str(number) / "best"
        folder.parent.mkdir()
        if replaced:
            write_folder(folder, fill(ONE))
        died = dies_at(number, lambda folder=folder: write_folder(folder, fill(TWO)))
        assert not folder.exists() or damage(folder) is None  # whatever is under its name is whole
        for again in range(30):  # and killed while it is recovered, at every operation
            if not dies_at(again, lambda folder=folder: recover(folder)):
                break
        recover(folder)
        there = files_in(folder) if folder.exists() else None
        assert there in ((ONE, TWO) if replaced else (None, TWO))
        assert there is None or damage(folder) is None
        assert names(folder.parent) == ([] if there is None else ["best"])
        ends.append(there == TWO)
        if not died:
            break
    assert ends == sorted(ends)
    assert not ends[0]
    assert number > 10


@pytest.mark.usefixtures("no_sync")
def test_killed_at_any_operation_a_folder_of_the_users_keeps_its_files(tmp_path):
    """Also one that had no manifest of ours when we first wrote a folder of its name."""
    for number in range(100):
        folder = tmp_path / str(number) / "best"
        folder.mkdir(parents=True)
        (folder / "notes.txt").write_text("mine")
        died = dies_at(number, lambda folder=folder: write_folder(folder, fill(TWO)))
        recover(folder)
        assert files_in(folder) in ({"notes.txt": "mine"}, TWO | {"notes.txt": "mine"})
        assert (folder / MANIFEST).exists() == (folder / "model").exists()
        assert names(folder.parent) == ["best"]
        if not died:
            break
    assert number > 10


@pytest.mark.usefixtures("no_sync")
def test_killed_at_any_operation_an_empty_folder_is_replaced_with_nothing_left(tmp_path):
    """Nothing but the partial folder and the lock, which the next writer takes away."""
    found = set()
    for number in range(100):
        folder = tmp_path / str(number) / "model"
        folder.mkdir(parents=True)
        died = dies_at(number, lambda folder=folder: write_folder(folder, fill(TWO), only_new=True))
        assert {*names(folder.parent)} <= {"model", "model.partial", "model.writing"}
        found.add(is_whole := files_in(folder) == TWO)
        if not is_whole:
            assert names(folder) == []
            write_folder(folder, fill(TWO), only_new=True)
            assert names(folder.parent) == ["model"]
        with pytest.raises(OutputError, match="model is not empty: choose a new folder"):
            write_folder(folder, fill(ONE), only_new=True)
        assert names(folder.parent) == ["model"]
        assert files_in(folder) == TWO
        if not died:
            break
    assert found == {False, True}


@pytest.mark.usefixtures("no_sync")
def test_killed_at_any_operation_a_folder_is_deleted_in_the_end(tmp_path):
    for number in range(100):
        folder = tmp_path / str(number) / "step_0_1"
        folder.parent.mkdir()
        write_folder(folder, fill(ONE))
        (folder / "notes.txt").write_text("mine")
        died = dies_at(number, lambda folder=folder: retire(folder))
        gone = not (folder / "model").exists()
        assert gone or damage(folder) is None  # never a half-deleted one
        recover(folder)
        assert files_in(folder) == {"notes.txt": "mine"} | ({} if gone else ONE)
        assert names(folder.parent) == ["step_0_1"]
        if not died:
            break
    assert number > 3


def test_what_we_did_not_write_moves_into_the_new_folder(folder):
    (folder / "notes.txt").write_text("mine")
    (folder / "deep" / "own").mkdir()
    (folder / "deep" / "own" / "data").write_text("mine too")
    write_folder(folder, fill(TWO))
    assert files_in(folder) == TWO | {"notes.txt": "mine", "deep/own/data": "mine too"}
    assert names(folder.parent) == ["best"]
    assert damage(folder) is None


def test_what_has_no_room_in_the_new_folder_stays_beside_it(folder, caplog):
    (folder / "tokenizer").write_text("mine")
    write_folder(folder, fill(TWO))
    assert files_in(folder) == TWO
    assert files_in(folder.with_name("best.replaced")) == {"tokenizer": "mine"}
    assert "best.replaced keeps tokenizer" in caplog.text
    for _ in range(2):
        write_folder(folder, fill(TWO))
        recover(folder)
    left = [files_in(path) for path in folder.parent.iterdir() if path != folder]
    assert left == [{"tokenizer": "mine"}]


def test_a_folder_of_the_users_is_never_emptied(tmp_path):
    for name in ("best", "best.partial", "best.replaced", "best.deleted"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text(name)
    recover(tmp_path / "best")
    retire(tmp_path / "best")
    assert all((tmp_path / name / "thesis.txt").read_text() == name for name in names(tmp_path)[:1])
    write_folder(tmp_path / "best", fill(ONE))
    texts = [path.read_text() for path in tmp_path.rglob("thesis.txt")]
    assert sorted(texts) == ["best", "best.deleted", "best.partial", "best.replaced"]
    assert files_in(tmp_path / "best") == ONE | {"thesis.txt": "best"}


def test_a_link_is_moved_out_of_the_way_and_what_it_points_to_stays(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis.txt").write_text("mine")
    os.symlink(tmp_path / "elsewhere", tmp_path / "best")
    write_folder(tmp_path / "best", fill(ONE))
    assert files_in(tmp_path / "best") == ONE
    assert files_in(tmp_path / "elsewhere") == {"thesis.txt": "mine"}
    assert (tmp_path / "best.kept").is_symlink()


@pytest.mark.parametrize("name", ("rename", "fsync"))
def test_a_full_disk_leaves_the_old_folder(name, folder, monkeypatch):
    """Also if it is the last of the two renames that fails."""
    stock, count = getattr(os, name), 0

    def fail(*args, **settings):
        nonlocal count
        count += 1
        if count == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return stock(*args, **settings)

    (folder.parent / "x").touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(OutputError, match=f"cannot write {folder}.*: the disk"):
            write_folder(folder, fill(TWO | {"deep/x": "y"}))
    assert files_in(folder) == ONE
    assert names(folder.parent) == ["best", "x"]


@pytest.mark.parametrize(
    "change, message",
    (
        (lambda f: (f / "model").write_text("111111112"), "model is not what was written: its SHA-256 differs"),
        (lambda f: (f / "model").write_text("1" * 8), "model has 8 bytes instead of 9"),
        (lambda f: (f / "deep" / "er" / "file").unlink(), "deep/er/file is missing"),
        (lambda f: (f / MANIFEST).write_text("{"), "manifest.json is damaged"),
        (lambda f: begin(f.with_name("x")).joinpath(MANIFEST).replace(f / MANIFEST), "manifest.json is damaged"),
    ),
)
def test_damage_is_named(change, message, folder):
    change(folder)
    assert damage(folder) == message


@pytest.mark.parametrize("name", ("../thesis.txt", "/etc/passwd", "a/../../thesis.txt"))
def test_a_manifest_names_files_in_its_folder_only(name, folder):
    (folder.parent / "thesis.txt").write_text("mine")
    entry = folders.digest(folder.parent / "thesis.txt")
    (folder / MANIFEST).write_text(json.dumps({"collab_heads_manifest": 1, "files": {name: entry}}))
    assert not is_ours(folder)
    retire(folder)
    assert (folder.parent / "thesis.txt").read_text() == "mine"
