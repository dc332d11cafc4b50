"""Checkpoints of long runs: folders that are whole or not there, with the progress of the run that wrote them.

A checkpoint is a folder with a manifest (`files/folders.py`). Its `progress.json` holds the format, the description of
the run under `run`, and the position in it. What else is in the folder is up to the run.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.errors import OutputError
from collab_heads.files.atomic import write_json, writing
from collab_heads.files.folders import DELETED, OLD, begin, beside, commit, damage, unharmed
from collab_heads.files.locks import PARTIAL
from collab_heads.files.reading import parse_json, read_text

PROGRESS, FORMAT = "progress.json", 3


@contextmanager
def new_checkpoint(
    folder: Path, progress: Mapping[str, Any], size: int | None = None, *, writes: bool = True
) -> Iterator[Path]:
    """Write a checkpoint in place of the one before, which stays until the new one is complete.

    The context fills the partial folder that it is given. Several processes may fill it: the first one opens the
    context with `writes`, the others without.

    Args:
        folder: its final path.
        progress: what `read_progress` returns: `run` describes the run, as `check_same_run` compares it.
        size: bytes that it needs, if known; for the message of an error.
        writes: whether this process makes the folder, adds the progress and completes it.

    Raises:
        OutputError: if it cannot be written, for example to a full disk.
    """
    partial = beside(folder, PARTIAL)
    with unharmed(folder, size) if writes else writing(folder, size):
        if writes:
            begin(folder)
        yield partial
        if writes:
            write_json(partial / PROGRESS, {**progress, "format": FORMAT})
            commit(folder)


def read_progress(folder: Path, check: Callable[[Any], None] | None = None) -> dict:
    """Read the progress that a checkpoint records.

    Args:
        folder: of the checkpoint.
        check: raises ValueError, with the reason, on what cannot be a progress of this kind of run.

    Raises:
        OutputError: if the folder is not a finished checkpoint, or is of another format.
    """
    if folder.name.endswith((PARTIAL, OLD, DELETED)):
        raise OutputError(f"{folder} was not finished: the run ended while writing it, or deleting it")
    if not folder.is_dir():
        raise OutputError(f"{folder} is not a folder")
    try:
        progress = parse_json(read_text(folder / PROGRESS))
        if not isinstance(progress, dict):
            raise ValueError("it is not an object")
        version = progress.pop("format", None)
        if version == FORMAT and check is not None:
            check(progress)
    except (OSError, ValueError) as error:
        raise OutputError(f"{folder} is not a finished checkpoint (no valid {PROGRESS}: {error})") from error
    if version != FORMAT:
        raise OutputError(f"{folder} is of format {version!r}, and this version resumes format {FORMAT} only")
    return progress


def check_holds(folder: Path, names: Iterable[str]) -> None:
    """Raise OutputError unless a checkpoint holds these files."""
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise OutputError(f"{folder} lacks {', '.join(missing)}: it is damaged")


def check_undamaged(folder: Path) -> None:
    """Raise OutputError, naming the file, unless every file of a checkpoint is as it was written."""
    if wrong := damage(folder):
        raise OutputError(f"{folder} is damaged: {wrong}")


def check_same_run(folder: Path, recorded: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Raise OutputError, naming the differences, unless a checkpoint is of this run.

    Args:
        folder: of the checkpoint.
        recorded: the description of its run.
        run: the description of this run.
    """
    now = json.loads(json.dumps(run))  # turns tuples into lists, as in the record
    # as text: a width of 1 is not a share of 1.0
    differing = [name for name in sorted(recorded.keys() | now) if repr(recorded.get(name)) != repr(now.get(name))]
    if differing:
        pairs = ", ".join(f"{name} was {recorded.get(name)!r} and is {now.get(name)!r}" for name in differing)
        raise OutputError(f"{folder} is of another run: {pairs}: give what that run was given")


def digest_of(named: Iterable[tuple[str, Any]]) -> str:
    """Return the first 16 hexadecimal digits of a SHA-256 of named tensors and other values."""
    sha256 = hashlib.sha256()
    for name, value in named:
        sha256.update(name.encode())
        if isinstance(value, Tensor):
            sha256.update(f"{value.dtype}{tuple(value.shape)}".encode())
            flat = value.detach().cpu().contiguous().flatten()
            sha256.update(flat.view(torch.uint8).numpy().tobytes())
        else:
            sha256.update(repr(value).encode())
    return sha256.hexdigest()[:16]


# entries of a config that say how a model was made, and how it runs
NOT_COMPUTED = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
NOT_COMPUTED |= {"use_cache", "return_dict", "output_hidden_states", "output_attentions"}


def digest_of_model(model: PreTrainedModel) -> str:
    """Return the digest of all by which a model computes: its weights and buffers, and its config."""

    def computed(entries: Mapping) -> dict:
        kept = {str(name): value for name, value in entries.items() if name not in NOT_COMPUTED}
        return {name: computed(kept[name]) if isinstance(kept[name], Mapping) else kept[name] for name in sorted(kept)}

    return digest_of([*model.state_dict().items(), ("config", computed(model.config.to_dict()))])


def digest_of_batches(batches: Iterable[Mapping]) -> str:
    """Return the digest of the inputs of some batches."""
    return digest_of((f"{index}/{name}", each) for index, batch in enumerate(batches) for name, each in batch.items())
