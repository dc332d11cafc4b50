"""Write into the output folder of a run, and track which of its files we may replace or delete."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from collab_heads.errors import CollabHeadsError, OutputError
from collab_heads.files.atomic import sync, why_not_written, write_file, writing
from collab_heads.files.checkpoint import PROGRESS
from collab_heads.files.folders import (
    DELETED,
    MANIFEST,
    OLD,
    digest,
    digest_of,
    is_begun,
    is_ours,
    keep,
    read_manifest,
    recover,
    retire,
    stays_inside,
    write_folder,
    write_manifest,
)
from collab_heads.files.locks import INSIDE, PARTIAL, WRITING, locked, made
from collab_heads.training.storage.checkpoint import NAME

RESULTS, PREDICTIONS, LOGS = "all_results.json", "predictions", "logs"
TRANSLATIONS, STATISTICS, REPORT = "translations", "head_statistics", "head_report"
BEST = {"fine_tuned": "best", "fine_tuned_again": "best_again"}  # of each training, by its stage
HISTORY = "head_history"  # of heads over the training, and its pictures
STAGED = "model.staged"  # the complete final model, until it is moved into the output folder itself
FOLDERS = (*BEST.values(), STATISTICS, REPORT, STAGED)  # each written as a whole, like checkpoints
RECORD = "collab_heads_output"  # marks the manifest of an output folder, not that of a folder written as a whole
CONFIG = "config.json"  # without it no model loads
MODEL = (CONFIG, "generation_config.json", "model.safetensors", "model.safetensors.index.json")
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt"),
    *("vocab.json", "merges.txt", "spiece.model", "source.spm", "target.spm", "tokenizer.model"),
    *("sentencepiece.bpe.model", "chat_template.jinja"),
)
PROCESSOR = ("preprocessor_config.json", "processor_config.json")
LEFTOVERS = (PARTIAL, OLD, DELETED, WRITING)  # endings of what a killed run can leave beside its folders
NEEDED = (RESULTS, *MODEL, *TOKENIZER, *PROCESSOR)


class Output:
    """An output folder and its record of the files that our runs wrote.

    The record, `manifest.json`, lists a file before it is written, with the digests of its present and its future
    content. So at whatever moment a run is killed, a file is ours if and only if its digest is recorded.

    Args:
        path: the folder; it need not exist yet.

    Attributes:
        recorded: whether there was a record.
        files: name, relative to the folder -> its allowed digests; None for a file that grows, such as a log.
        model: the names of the final model's files.
    """

    def __init__(self, path: Path):
        self.path = path
        record = read_record(path)
        self.recorded = record is not None
        self.files: dict[str, list[dict] | None] = record["files"] if record else {}
        self.model: list[str] = record["model"] if record else []

    def owns(self, name: str) -> bool:
        """Return True if a file exists and is as we wrote it."""
        path = self.path / name
        is_file = os.path.isfile(path) and not path.is_symlink()  # False for names that no file can have
        if name not in self.files or not is_file or not stays_inside(self.path, name):
            return False
        expected = self.files[name]
        return expected is None or digest(path) in expected  # None: known by its name only

    def claim(self, digests: dict[str, dict]) -> None:
        """Record the files that are about to be written; move away files in their place that are not ours."""
        check_inside(self.path, digests)
        for name, coming in digests.items():
            path, partial = self.path / name, self.path / (name + PARTIAL)
            if os.path.lexists(partial) and name not in self.files:
                keep(partial)
            if os.path.lexists(path) and not self.owns(name):
                keep(path)
            self.files[name] = [*([digest(path)] if path.exists() else []), coming]
        self.save()

    def save(self) -> None:
        """Write the record to `manifest.json`."""
        write_manifest(self.path, self.files, RECORD, model=self.model)

    def write(self, name: str, content: bytes) -> Path:
        """Record and write a file; its name may contain folders."""
        self.claim({name: digest_of(content)})
        return write_file(self.path / name, content)

    def write_json(self, name: str, content: Mapping) -> Path:
        return self.write(name, (json.dumps(content, indent=1) + "\n").encode())

    def write_folder(self, name: str, fill: Callable[[Path], object], size: int | None = None) -> Path:
        """Let `fill` write a folder, which gets a manifest of its own; return its path."""
        if not (self.path / MANIFEST).exists():
            self.save()  # it marks the folder as ours
        write_folder(self.path / name, fill, size)
        return self.path / name

    def write_model(self, fill: Callable[[Path], object], size: int | None = None) -> None:
        """Write the final model; if the run is killed meanwhile, the old model, the new one or none can be loaded."""
        self.write_folder(STAGED, fill, size)
        self.install()

    def install(self) -> None:
        """Move the files of the staged model into place; also completes a move that a killed run began.

        The old config is removed first and the new one is moved last. No model loads without a config, so a mixture of
        two models never loads.
        """
        staged = self.path / STAGED
        listed = (read_manifest(staged) or {}).get("files") or {}
        check_inside(staged, listed)
        with writing(self.path):
            self.claim({name: entry for name, entry in listed.items() if (staged / name).exists()})
            gone = [name for name in self.model if name not in listed]
            for name in [CONFIG, *gone] if (staged / CONFIG).exists() else gone:
                if self.owns(name):
                    (self.path / name).unlink()
            for name in sorted(listed, key=lambda name: name == CONFIG):
                if (staged / name).exists():
                    (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(staged / name, self.path / name)
            self.model = sorted(listed)
            self.files = {name: entry for name, entry in self.files.items() if name not in gone}
            self.save()
            retire(staged)

    def note_logs(self, act: Callable[[], object]) -> None:
        """Call `act`, which starts log files, and record the new files as ours."""
        before = set(self.logs())
        act()
        if new := [name for name in self.logs() if name not in before]:
            self.files |= dict.fromkeys(new)
            self.save()

    def logs(self) -> list[str]:
        """Return the names of the files below `logs`, relative to the output folder."""
        return [p.relative_to(self.path).as_posix() for p in (self.path / LOGS).rglob("*") if p.is_file()]

    def folders(self) -> list[Path]:
        """Return the folders that were written as a whole: checkpoints, best weights, reports, the staged model."""
        return [
            path
            for path in self.path.iterdir()
            if (NAME.fullmatch(path.name) or path.name in FOLDERS) and is_ours(path)
        ]

    def recover(self) -> None:
        """Finish or undo what a killed run left unfinished."""
        for name in {path.name.removesuffix(end) for path in self.path.iterdir() for end in LEFTOVERS}:
            if NAME.fullmatch(name) or name in FOLDERS:
                recover(self.path / name)
        for name in self.files:
            partial = self.path / (name + PARTIAL)
            if os.path.lexists(partial) and not partial.is_dir() and stays_inside(self.path, name):
                partial.unlink()
        if is_begun(self.path / (MANIFEST + PARTIAL)):
            (self.path / (MANIFEST + PARTIAL)).unlink()
        if is_ours(self.path / STAGED) and (read_manifest(self.path / STAGED) or {}).get("files"):
            self.install()

    def clear(self) -> None:
        """Delete what earlier runs wrote, results and config first; files that were changed since then stay."""
        with writing(self.path):
            for name in sorted(self.files, key=lambda name: name not in (RESULTS, CONFIG)):
                if self.owns(name):
                    (self.path / name).unlink()
            for folder in self.folders():
                retire(folder)
            for name in {Path(name).parent.as_posix() for name in self.files if stays_inside(self.path, name)}:
                remove_if_empty(self.path, name)
            self.files, self.model = {}, []
            if (self.path / MANIFEST).exists():
                self.save()


def read_record(folder: Path) -> dict | None:
    """Return the record of an output folder; None if it is missing, damaged, of a newer version or not ours."""
    record = read_manifest(folder, RECORD)
    if record is None or not isinstance(record["files"], dict):
        return None
    model = record.get("model")
    fits = all(isinstance(entry, list | None) for entry in record["files"].values())
    return record if fits and isinstance(model, list) and all(isinstance(name, str) for name in model) else None


def check_inside(folder: Path, names: Iterable[str]) -> None:
    """Raise OutputError if a file would be written out of the folder, through a link in it."""
    for name in names:
        if not stays_inside(folder, name):
            raise OutputError(f"{str(folder / name)!r:.300} leads out of {folder} through a link: remove the link")


def remove_if_empty(output_dir: Path, name: str) -> None:
    """Remove a folder below the output folder, then its parents there, as long as they are empty."""
    for path in (output_dir / name, *(output_dir / name).parents):
        if path == output_dir or not path.is_dir() or path.is_symlink() or any(path.iterdir()):
            return
        path.rmdir()


def files_in_use(folder: Path) -> list[Path]:
    """Return what is in an output folder, but for the lock of a run."""
    return [path for path in folder.iterdir() if path.name != INSIDE] if folder.is_dir() else []


def in_use(folder: Path) -> OutputError:
    """Make the error for an output folder that is not empty."""
    return OutputError(
        f"--output_dir {folder} is in use: choose another, resume it with --resume_from_checkpoint, or replace what an "
        "earlier run wrote there with --overwrite_output_dir"
    )


def check_output(output: Output, *, overwrite: bool, resume: bool, inputs: Iterable[str] = ()) -> None:
    """Check that a run may write to an output folder; nothing is changed.

    Args:
        output: the folder.
        overwrite: whether the output of an earlier run may be replaced.
        resume: whether the run is resumed from a checkpoint in this folder.
        inputs: files and folders that the run reads.
    """
    if output.path.exists() and not output.path.is_dir():
        raise OutputError(f"--output_dir {output.path} is a file")
    there = files_in_use(output.path)
    if there and not overwrite and not resume:
        raise in_use(output.path)
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
    """Raise OutputError if the run would replace files that we did not write, or that were changed since."""
    names = [*NEEDED, *(name + PARTIAL for name in NEEDED if name not in output.files)]
    wrong = [name for name in names if os.path.lexists(output.path / name) and not output.owns(name)]
    for name in FOLDERS:
        recorded = (read_manifest(output.path / name) or {}).get("files") or {}
        wrong += [f"{name}/{each}" for each in NEEDED if each not in recorded and (output.path / name / each).exists()]
    for name in (*FOLDERS, TRANSLATIONS, PREDICTIONS, HISTORY, LOGS):
        path = output.path / name
        wrong += [name] if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()) else []
    if wrong:
        raise OutputError(
            f"--output_dir {output.path} holds {', '.join(wrong)}: a run would write there, and no {MANIFEST} says "
            "that one of ours did (or it was changed since): move it, or choose another folder"
        )


def is_record(checkpoint: Path) -> bool:
    """Return True if a folder is a checkpoint without a manifest."""
    return (checkpoint / PROGRESS).exists() and not is_ours(checkpoint)


def lies_in(source: Path, folder: Path, files: Iterable[str]) -> bool:
    """Return True if a file or folder lies in an output folder, or is one of its files under another name."""
    if not os.path.lexists(source):
        return False  # a name on the Hub
    paths = source.resolve(), source.parent.resolve() / source.name
    if any(same_path(each, folder) for path in paths for each in (path, *path.parents)):
        return True
    return source.resolve() in {(folder / name).resolve() for name in files}


def same_path(one: Path, other: Path) -> bool:
    """Return True if two paths lead to the same file or folder, also where upper and lower case are the same."""
    return one.exists() and other.exists() and one.samefile(other)


TRIAL = ".collab_heads." + "trial" * 20  # as long as the longest name that a run writes


@contextmanager
def reserved(folder: Path) -> Iterator[None]:
    """Lock a folder while the context is open, and check that it can be written to.

    A folder that does not exist is made, and removed at the end if it is still empty.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(Path(os.path.realpath(folder))))
            stack.enter_context(made(folder))
            if not folder.is_dir():
                raise OutputError(f"--output_dir {folder} is a file")
            try_writing(folder)
        except CollabHeadsError:
            raise
        except (OSError, ValueError) as error:  # ValueError: a null byte
            reason = why_not_written(error) or str(error)
            raise OutputError(f"--output_dir {str(folder)!r} cannot be written to: {reason}: choose another") from error
        yield


def try_writing(folder: Path) -> None:
    """Write a small file with a long name, and delete it."""
    trial = folder / TRIAL
    try:
        trial.write_bytes(bytes(4096))
        sync(trial)
    finally:
        trial.unlink(missing_ok=True)
