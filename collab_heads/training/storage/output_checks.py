"""Whether a run may write to its output folder: nothing that it reads, and nothing that we did not write, is lost."""

import os
from collections.abc import Iterable
from pathlib import Path

from collab_heads.errors import OutputError
from collab_heads.files import PARTIAL
from collab_heads.folders import MANIFEST, is_begun, is_ours, read_manifest
from collab_heads.training.storage.checkpoint import NAME, PROGRESS
from collab_heads.training.storage.output import FOLDERS, HISTORY, LOGS, NEEDED, PREDICTIONS, TRANSLATIONS, Output
from collab_heads.training.storage.reservation import LOCK


def check_output(output: Output, *, overwrite: bool, resume: bool, inputs: Iterable[str] = ()) -> None:
    """Check that a run may write here, without touching anything.

    Args:
        output: the folder.
        overwrite: what an earlier run left is to be replaced.
        resume: the run goes on from a checkpoint in this folder.
        inputs: files and folders that the run reads.

    Raises:
        OutputError: if the folder is a file, or is in use and neither to be overwritten nor to be resumed in; if
            something that the run reads would be deleted; if something that we did not write would be replaced.
    """
    if output.path.exists() and not output.path.is_dir():
        raise OutputError(f"--output_dir {output.path} is a file")
    there = [path for path in output.path.iterdir() if path.name != LOCK] if output.path.is_dir() else []
    if there and not overwrite and not resume:
        raise OutputError(
            f"--output_dir {output.path} is in use: choose another, go on with --resume_from_checkpoint, "
            "or replace what an earlier run wrote there with --overwrite_output_dir"
        )
    if overwrite and not resume:
        for each in inputs:
            if lies_in(Path(each), output.path, output.files):
                raise OutputError(
                    f"--overwrite_output_dir would delete {each}, which the run reads: choose another "
                    "--output_dir, or move it"
                )
    for name, ours in ((MANIFEST, output.recorded), (MANIFEST + PARTIAL, is_begun(output.path / (MANIFEST + PARTIAL)))):
        if os.path.lexists(output.path / name) and not ours:
            raise OutputError(
                f"--output_dir {output.path} holds a {name} that is damaged, of a newer version or not ours: "
                "move it, or choose another folder"
            )
    if there and (overwrite or output.recorded):
        check_replaced(output)
    mistaken = [path.name for path in there if NAME.fullmatch(path.name) and is_record(path)]
    if mistaken and overwrite and not resume:
        raise OutputError(
            f"--output_dir {output.path} holds {', '.join(mistaken)}, of a run that kept no {MANIFEST}: this run's "
            "checkpoints could be mistaken for these: move them, or choose another folder"
        )


def check_replaced(output: Output) -> None:
    """Raise OutputError if the run would have to replace something that we did not write, or that was changed."""
    names = [*NEEDED, *(name + PARTIAL for name in NEEDED if name not in output.files)]
    wrong = [name for name in names if os.path.lexists(output.path / name) and not output.owns(name)]
    for name in FOLDERS:
        recorded = (read_manifest(output.path / name) or {}).get("files") or {}
        wrong += [f"{name}/{each}" for each in NEEDED if each not in recorded and (output.path / name / each).exists()]
    for name in (*FOLDERS, TRANSLATIONS, PREDICTIONS, HISTORY, LOGS):
        path = output.path / name
        wrong += [name] if os.path.lexists(path) and not path.is_dir() else []
    if wrong:
        raise OutputError(
            f"--output_dir {output.path} holds {', '.join(wrong)}: a run would write there, and no {MANIFEST} says "
            "that one of ours did (or it was changed since): move it, or choose another folder"
        )


def is_record(checkpoint: Path) -> bool:
    """Whether a folder is a checkpoint without a manifest."""
    return (checkpoint / PROGRESS).exists() and not is_ours(checkpoint)


def lies_in(source: Path, folder: Path, files: Iterable[str]) -> bool:
    """Whether a file or folder lies in an output folder, or is one of its files by another name."""
    if not os.path.lexists(source):
        return False  # a name on the Hub
    paths = source.resolve(), source.parent.resolve() / source.name
    if any(same_path(each, folder) for path in paths for each in (path, *path.parents)):
        return True
    return source.resolve() in {(folder / name).resolve() for name in files}


def same_path(one: Path, other: Path) -> bool:
    """Whether two paths lead to the same file or folder, also where upper and lower case are the same."""
    return one.exists() and other.exists() and one.samefile(other)
