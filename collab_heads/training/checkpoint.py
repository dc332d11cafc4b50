"""Checkpoints that are either complete or not there: written aside, then renamed.

A checkpoint folder is what `save_pretrained` writes (so `from_pretrained` loads it), Accelerate's state of optimizer,
schedule and random generators, and `progress.json`, written last. Accelerate's files are pickles, read with torch's
restricted unpickler: go on only from your own.
"""

import json
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from accelerate import Accelerator

from collab_heads.errors import OutputError

PROGRESS = "progress.json"
PARTIAL = ".partial"
NAME = re.compile(r"(?:epoch|step)_\d+(?:_\d+)?")


def write_json(path: Path, content: Mapping) -> None:
    """Write JSON aside, then rename: a reader never sees half a file."""
    aside = path.with_name(path.name + PARTIAL)
    aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)


def save_checkpoint(accelerator: Accelerator, folder: Path, save_model, progress: Mapping) -> None:
    """Save everything that a run needs to go on. All processes call it.

    Args:
        accelerator: its prepared optimizer and schedule are saved; the model is not (see `save_model`).
        folder: where it ends up.
        save_model: writes model and tokenizer into a folder; called on the main process.
        progress: JSON, what `load_progress` gives back.
    """
    aside = folder.with_name(folder.name + PARTIAL)
    if accelerator.is_main_process:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save_model(aside)
    accelerator.wait_for_everyone()
    hook = accelerator.register_save_state_pre_hook(lambda models, weights, output_dir: weights.clear())
    accelerator.save_state(str(aside))
    hook.remove()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_json(aside / PROGRESS, progress)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(aside, folder)
    accelerator.wait_for_everyone()


def write_model(folder: Path, save_model) -> None:
    """Write a model aside, then rename: a reader never sees half of one."""
    aside = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_model(aside)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(aside, folder)


def load_state(accelerator: Accelerator, folder: Path) -> None:
    """Load optimizer, schedule and random generators into what the accelerator has prepared."""
    hook = accelerator.register_load_state_pre_hook(lambda models, input_dir: models.clear())
    accelerator.load_state(str(folder))
    hook.remove()


def load_progress(folder: Path) -> dict:
    """Read what a checkpoint says of itself.

    Raises:
        OutputError: if the folder is no finished checkpoint of ours.
    """
    if not folder.is_dir():
        raise OutputError(f"--resume_from_checkpoint: {folder} is not a folder")
    if folder.name.endswith(PARTIAL):
        raise OutputError(f"--resume_from_checkpoint: {folder} was not finished: the run ended while writing it")
    try:
        progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        progress["phase"], progress["step"], progress["arguments"], progress["processes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(
            f"--resume_from_checkpoint: {folder} is not a finished checkpoint of this script "
            f"(no valid {PROGRESS}: {error})"
        ) from error
    random_states = [f"random_states_{rank}.pkl" for rank in range(progress["processes"])]
    expected = ["config.json", "optimizer.bin", "scheduler.bin", *random_states]
    if missing := [name for name in expected if not (folder / name).is_file()]:
        raise OutputError(f"--resume_from_checkpoint: {folder} lacks {', '.join(missing)}: it is damaged")
    return progress


def checkpoints(output_dir: Path) -> list[Path]:
    """The finished checkpoints of an output folder, oldest first."""
    ages = {}
    for folder in output_dir.glob("*_*"):
        if NAME.fullmatch(folder.name):
            try:
                progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
                ages[folder] = progress["phase"], progress["step"]
            except (OSError, ValueError, KeyError, TypeError):
                continue  # not one of ours, or damaged: `load_progress` says so to whoever asks for it
    return sorted(ages, key=ages.get)


def find_checkpoint(resume_from: str, output_dir: Path) -> Path:
    """Resolve `--resume_from_checkpoint`: a folder, or "latest".

    Raises:
        OutputError: if there is none.
    """
    if resume_from != "latest":
        return Path(resume_from)
    found = checkpoints(output_dir)
    if not found:
        in_use = output_dir.is_dir() and any(output_dir.iterdir())
        way = "give --overwrite_output_dir instead" if in_use else "leave it out"
        raise OutputError(
            f"--resume_from_checkpoint: {output_dir} holds no finished checkpoint: to start from the beginning {way}; "
            "--checkpointing_steps writes checkpoints to resume from"
        )
    return found[-1]


def check_continues(folder: Path, progress: Mapping, arguments: Mapping, processes: int) -> None:
    """Raise OutputError unless a run with these arguments continues the recorded one; name what differs."""
    recorded = progress["arguments"]
    now = json.loads(json.dumps(arguments))  # tuples as lists, as the record has them
    # as text: a width of 1 is not a share of 1.0
    differing = [name for name in sorted(recorded.keys() | now) if repr(recorded.get(name)) != repr(now.get(name))]
    if differing:
        pairs = ", ".join(f"{name} was {recorded.get(name)!r} and is {now.get(name)!r}" for name in differing)
        raise OutputError(f"--resume_from_checkpoint {folder}: the run would not be the same: {pairs}")
    if progress["processes"] != processes:
        raise OutputError(
            f"--resume_from_checkpoint {folder}: it was made with {progress['processes']} process(es), "
            f"this run has {processes}"
        )


def go_on_from(args: Namespace, arguments: Mapping, processes: int) -> tuple[Path | None, dict]:
    """The checkpoint that the flags name, checked against this run, and what it says of itself; (None, {}) without."""
    if not args.resume_from_checkpoint:
        return None, {}
    folder = find_checkpoint(args.resume_from_checkpoint, Path(args.output_dir))
    progress = load_progress(folder)
    check_continues(folder, progress, arguments, processes)
    return folder, progress


def prune_checkpoints(output_dir: Path, keep: int | None) -> None:
    """Delete all but the newest `keep` checkpoints; None keeps all."""
    for folder in checkpoints(output_dir)[:-keep] if keep else []:
        shutil.rmtree(folder)
