"""An output folder with records that are damaged, foreign or newer, and files of the user's under names like ours."""

import json
import os
from argparse import Namespace
from pathlib import Path

import pytest

from collab_heads.errors import OutputError
from collab_heads.files.folders import digest, write_folder
from collab_heads.training.runs.session import lies_below, prepared_output
from collab_heads.training.storage.output import Output, check_output, lies_in


def write(path, text="mine"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def texts(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def out(tmp_path):
    """What a run leaves."""
    output = Output(tmp_path / "out")
    output.path.mkdir()
    output.save()
    output.write_model(lambda folder: write(folder / "config.json", "ours"))
    output.write("translations/a.txt", b"ours")
    return output.path


RECORDS = (
    '{"name": "a web page"}',
    '{"collab_heads_output": 1, "files": {"confi',
    '{"collab_heads_output": 2, "files": {}, "model": []}',
    '{"collab_heads_output": 1, "files": ["config.json"], "model": []}',
    '{"collab_heads_output": 1, "files": {"config.json": 5}, "model": []}',
    '{"collab_heads_output": 1, "files": {"config.json": {"bytes": 4}}, "model": []}',
    '{"collab_heads_output": 1, "files": {}, "model": 5}',
    '{"collab_heads_output": 1, "files": {}, "model": [[]]}',
    '{"collab_heads_manifest": 1, "files": {}}',
)


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("resume", (True, False))
def test_a_record_that_is_not_ours_or_cannot_be_read_stays(record, resume, out):
    """Also when a run goes on: it would start the record anew."""
    write(out / "manifest.json", record)
    before = texts(out)
    Output(out).recover()
    with pytest.raises(OutputError, match=r"manifest.json that is damaged, of a newer version or not ours: move it"):
        check_output(Output(out), overwrite=not resume, resume=resume)
    assert texts(out) == before


@pytest.mark.parametrize("end", ("", ".partial"))
def test_a_manifest_that_was_begun_and_is_not_ours_stays(end, tmp_path):
    write(tmp_path / f"manifest.json{end}")
    for resume in (True, False):
        with pytest.raises(OutputError, match=f"manifest.json{end}"):
            check_output(Output(tmp_path), overwrite=not resume, resume=resume)


def test_an_output_folder_that_is_a_link(out, tmp_path):
    (tmp_path / "link").symlink_to(out)
    linked = Output(tmp_path / "link")
    check_output(linked, overwrite=True, resume=False)
    write(out / "config.json", "corrected by hand")
    with pytest.raises(OutputError, match=r"holds config\.json"):
        check_output(linked, overwrite=False, resume=True)
    linked.clear()
    assert texts(out).keys() == {"manifest.json", "config.json"}
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("name", ("best", "step_0_1"))
def test_an_output_folder_in_another_is_no_folder_of_that_run(name, out):
    inner = Output(out / name)
    inner.path.mkdir()
    inner.save()
    inner.write("all_results.json", b"{}")
    before = texts(inner.path)
    for _ in range(2):
        Output(out).recover()
        Output(out).clear()
        assert texts(inner.path) == before


def test_a_checkpoint_is_no_output_folder(tmp_path):
    write_folder(tmp_path / "step_0_1", lambda folder: write(folder / "config.json", "ours"))
    before = texts(tmp_path)
    with pytest.raises(OutputError, match=r"holds a manifest.json"):
        check_output(Output(tmp_path / "step_0_1"), overwrite=True, resume=False)
    assert texts(tmp_path) == before


def test_a_file_changed_at_the_same_length_in_one_of_our_folders_stays(out):
    write_folder(out / "best", lambda folder: write(folder / "notes.txt", "rate 0.1"))
    write(out / "best" / "notes.txt", "rate 0.2")
    Output(out).clear()
    assert (out / "best" / "notes.txt").read_text() == "rate 0.2"


@pytest.mark.parametrize("entry", (None, 5, {}, {"bytes": "x"}, []))
def test_a_manifest_with_broken_entries_deletes_nothing(entry, out):
    write(out / "best" / "config.json")
    write(out / "best" / "manifest.json", json.dumps({"collab_heads_manifest": 1, "files": {"config.json": entry}}))
    Output(out).clear()
    Output(out).recover()
    assert (out / "best" / "config.json").read_text() == "mine"


@pytest.mark.parametrize("name", ("../thesis.txt", "/thesis.txt", "a/../../thesis.txt"))
def test_a_record_names_files_in_its_folder_only(name, out, tmp_path):
    thesis = write(tmp_path / "thesis.txt")
    entry = {"files": {name.replace("/thesis", f"{tmp_path}/thesis") if name[0] == "/" else name: [digest(thesis)]}}
    write(out / "manifest.json", json.dumps({"collab_heads_output": 1, **entry, "model": []}))
    Output(out).clear()
    assert thesis.read_text() == "mine"
    assert Output(out).files == {}


def test_a_log_behind_a_link_is_not_ours_by_its_name(out, tmp_path):
    archive = tmp_path / "archive"
    (out / "logs").mkdir()
    Output(out).note_logs(lambda: write(out / "logs" / "events", "ours"))
    write(archive / "events")
    os.rename(out / "logs", tmp_path / "moved")
    (out / "logs").symlink_to(archive)
    Output(out).clear()
    assert texts(archive) == {"events": "mine"}


def test_a_partial_file_of_the_users_is_kept(out, tmp_path):
    thesis = write(tmp_path / "thesis.txt")
    (out / "translations" / "b.txt.partial").symlink_to(thesis)
    write(out / "translations" / "c.txt.partial")
    for name in "bc":
        Output(out).write(f"translations/{name}.txt", b"ours")
    Output(out).recover()
    assert thesis.read_text() == "mine"
    assert texts(out / "translations")["c.txt.partial.kept"] == "mine"
    assert (out / "translations" / "b.txt.partial.kept").is_symlink()


def test_a_manifest_of_the_users_in_a_folder_called_as_ours_stays(out):
    write(out / "best" / "manifest.json")
    for _ in range(2):
        Output(out).recover()
        Output(out).write_folder("best", lambda folder: write(folder / "config.json", "ours"))
    Output(out).clear()
    assert "mine" in texts(out).values()


def test_an_empty_folder_called_as_the_staged_model_deletes_no_model(out):
    (out / "model.staged").mkdir()
    Output(out).recover()
    assert (out / "config.json").read_text() == "ours"


@pytest.mark.parametrize("name", ("best.old", "best.bak", "step_0_1.old", "best (copy)"))
def test_a_copy_that_the_user_made_of_one_of_our_folders_stays(name, out):
    write_folder(out / name.split(".")[0].split(" ")[0], lambda folder: write(folder / "config.json", "ours"))
    write_folder(out / name, lambda folder: write(folder / "config.json", "ours"))
    Output(out).recover()
    Output(out).clear()
    assert (out / name / "config.json").read_text() == "ours"


def test_places_are_compared_as_the_system_does(out, tmp_path, monkeypatch):
    """Where upper and lower case are the same, two names are one folder; stood in for by a bind mount's like."""
    mounted = tmp_path / "OUT"
    write(mounted / "step_0_1" / "config.json")
    stock, same = Path.samefile, {mounted, out}
    monkeypatch.setattr(Path, "samefile", lambda one, other: stock(one, other) or {one, other} <= same)
    assert lies_in(mounted / "step_0_1" / "config.json", out, ())
    assert lies_below(mounted / "step_0_1", out)


@pytest.fixture
def home(out, tmp_path):
    """A folder of the user's, to which a link in the output folder of a stranger leads."""
    for name in ("notes.txt", "notes.txt.partial", "config.json"):
        write(tmp_path / "home" / name)
    (out / "sub").symlink_to(tmp_path / "home")
    return tmp_path / "home"


@pytest.mark.parametrize("entry", ("digest", None))
def test_nothing_behind_a_link_is_deleted_or_written(entry, out, home):
    before = texts(home)
    listed = {f"sub/{name}": [digest(home / name)] if entry else None for name in before}
    write(out / "manifest.json", json.dumps({"collab_heads_output": 1, "files": listed, "model": [*listed]}))
    write_folder(out / "best", lambda folder: write(folder / "a.txt", "ours"))
    (out / "best" / "sub").symlink_to(home)
    of_best = {name: entries[0] for name, entries in listed.items() if entries}
    write(out / "best" / "manifest.json", json.dumps({"collab_heads_manifest": 1, "files": of_best}))
    with pytest.raises(OutputError, match=r"sub/x.txt' leads out of .* through a link: remove the link"):
        Output(out).write("sub/x.txt", b"ours")
    Output(out).recover()
    Output(out).clear()
    assert texts(home) == before


def test_a_staged_model_does_not_leave_the_folder(out, home):
    before = texts(home)
    write_folder(out / "model.staged", lambda folder: write(folder / "sub" / "config.json", "theirs"))
    with pytest.raises(OutputError, match="leads out of"):
        Output(out).recover()
    assert texts(home) == before


def test_nothing_is_moved_in_from_behind_a_link(out, home):
    before = texts(home)
    (out / "sub").unlink()
    staged = {"collab_heads_manifest": 1, "files": {"sub/config.json": digest(home / "config.json")}}
    write(out / "model.staged" / "manifest.json", json.dumps(staged))
    (out / "model.staged" / "sub").symlink_to(home)
    with pytest.raises(OutputError, match="leads out of"):
        Output(out).recover()
    assert texts(home) == before


@pytest.mark.parametrize("name", ("translations", "logs", "best"))
def test_a_linked_subfolder_is_refused(name, out, home):
    (out / name).exists() and (out / name).rename(out / "moved")
    (out / name).symlink_to(home)
    with pytest.raises(OutputError, match=f"holds .*{name}: a run would write there"):
        check_output(Output(out), overwrite=True, resume=False)


@pytest.mark.parametrize("name", ("n" * 300, "\ud800", "config.json/x", "q"))
def test_odd_names_in_a_record(name, out):
    write(out / "q.partial" / "mine.txt")
    write(out / "manifest.json", json.dumps({"collab_heads_output": 1, "files": {name: None}, "model": []}))
    Output(out).recover()
    Output(out).clear()
    assert (out / "q.partial" / "mine.txt").read_text() == "mine" and (out / "config.json").read_text() == "ours"


def test_a_folder_in_use_is_left_as_it_is(out):
    """A run without flags is refused before leftovers of a killed one are touched."""
    write_folder(out / "step_0_4", lambda folder: write(folder / "config.json", "ours"))
    (out / "step_0_4").rename(out / "step_0_4.partial")
    before = texts(out)
    with pytest.raises(OutputError, match="is in use"):
        prepared_output(Namespace(output_dir=out, overwrite_output_dir=False, resume_from_checkpoint=None), {})
    assert texts(out) == before
