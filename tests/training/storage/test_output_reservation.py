"""An output folder belongs to one run at a time, and can be written to."""

import contextlib
import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from collab_heads.errors import OutputError
from collab_heads.files.locks import WRITING
from collab_heads.training.storage.output import reserved


def test_a_folder_is_made_and_an_empty_one_is_removed(tmp_path):
    with reserved(tmp_path / "new" / "deep"):
        assert list((tmp_path / "new" / "deep").iterdir()) == []
        assert (tmp_path / "new" / f"deep{WRITING}").exists()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    with reserved(tmp_path / "there"):
        pass
    assert (tmp_path / "there").is_dir()
    with reserved(tmp_path / "used" / "deep"):
        (tmp_path / "used" / "deep" / "file").touch()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file"]


def test_two_runs_cannot_have_one_folder(tmp_path):
    def again(folder):
        with reserved(folder):
            pass

    os.symlink(tmp_path, tmp_path / "link")
    with reserved(tmp_path), ThreadPoolExecutor(1) as other:
        for folder in (tmp_path, tmp_path / "link"):
            message = rf"{tmp_path} is in use by a run that is still going on .*\"process\": {os.getpid()}"
            with pytest.raises(OutputError, match=message):
                other.submit(again, folder).result()
    again(tmp_path)


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


def test_a_full_disk_is_found_before_the_run(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="cannot be written to: the disk"), reserved(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []
