"""A checkpoint is whole or not there, and is resumed by the run that wrote it only."""

import json

import pytest

from collab_heads.errors import OutputError
from collab_heads.files.checkpoint import FORMAT, check_same_run, check_undamaged, new_checkpoint, read_progress

PROGRESS = {"run": {"seed": 1}, "step": 3}


@pytest.fixture
def folder(tmp_path):
    with new_checkpoint(tmp_path / "step_3", PROGRESS) as partial:
        (partial / "weights").write_text("three")
    return tmp_path / "step_3"


def test_what_is_written_is_read_back(folder):
    assert read_progress(folder) == PROGRESS
    check_undamaged(folder)
    assert {path.name for path in folder.iterdir()} == {"weights", "progress.json", "manifest.json"}


def test_a_checkpoint_that_fails_leaves_the_one_before(folder):
    with pytest.raises(OutputError, match="cannot write"), new_checkpoint(folder, {**PROGRESS, "step": 4}) as partial:
        (partial / "weights").write_text("four")
        raise OSError(28, "No space left on device")
    assert read_progress(folder)["step"] == 3
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_second_process_only_fills_the_folder(tmp_path):
    folder = tmp_path / "step_3"
    with new_checkpoint(folder, PROGRESS) as partial, new_checkpoint(folder, PROGRESS, writes=False) as same:
        assert same == partial
        (same / "random_states_1").touch()
    assert (folder / "random_states_1").exists()
    check_undamaged(folder)


@pytest.mark.parametrize("version", (None, 1, 2))
def test_a_checkpoint_of_an_older_format_is_refused(version, folder):
    record = PROGRESS if version is None else {**PROGRESS, "format": version}
    (folder / "progress.json").write_text(json.dumps(record))
    message = f"is of format {version}, and this version resumes format {FORMAT} only"
    with pytest.raises(OutputError, match=message):
        read_progress(folder, check=lambda progress: pytest.fail("an older format is not checked further"))


@pytest.mark.parametrize("text", ("", "{", "[]", "null", "[" * 100_000))
def test_a_progress_that_is_none_is_refused(text, folder):
    (folder / "progress.json").write_text(text)
    with pytest.raises(OutputError, match=r"is not a finished checkpoint \(no valid progress.json"):
        read_progress(folder)


def test_the_runs_own_check_gives_the_reason(folder):
    def refuse(progress):
        raise ValueError(f"step {progress['step']} is odd")

    with pytest.raises(OutputError, match=r"no valid progress.json: step 3 is odd"):
        read_progress(folder, refuse)


def test_unfinished_folders_are_refused(folder):
    for end in (".partial", ".replaced", ".deleted"):
        with pytest.raises(OutputError, match="was not finished"):
            read_progress(folder.with_name(folder.name + end))
    with pytest.raises(OutputError, match="step_9 is not a folder"):
        read_progress(folder.with_name("step_9"))


def test_a_run_is_resumed_with_the_same_arguments_only(tmp_path):
    recorded = {"lr": 0.1, "sites": ["enc-self"], "seed": 1, "processes": 2}
    check_same_run(tmp_path, recorded, {**recorded, "sites": ("enc-self",)})
    with pytest.raises(OutputError) as caught:
        check_same_run(tmp_path, recorded, {"lr": 0.2, "sites": ["enc-self"], "new": 3, "processes": 3})
    pairs = "lr was 0.1 and is 0.2, new was None and is 3, processes was 2 and is 3, seed was 1 and is None"
    assert str(caught.value) == f"{tmp_path} is of another run: {pairs}: give what that run was given"


def test_a_width_of_one_is_not_a_share_of_one(tmp_path):
    with pytest.raises(OutputError, match=r"dim_shared_query_key was 1 and is 1\.0"):
        check_same_run(tmp_path, {"dim_shared_query_key": 1}, {"dim_shared_query_key": 1.0})
