"""Whether a run may write to a folder: what is in use, what would be replaced, what it reads."""

import pytest
from written_output import again, contents

from collab_heads.errors import OutputError
from collab_heads.files.locks import INSIDE
from collab_heads.training.storage.output import Output, check_output


def test_a_new_or_empty_folder_is_free_and_is_not_made(tmp_path):
    check_output(Output(tmp_path / "new"), overwrite=False, resume=False)
    assert not (tmp_path / "new").exists()
    (tmp_path / INSIDE).touch()  # the lock of this run, where it may write nothing beside the folder
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
