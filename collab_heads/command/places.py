"""Checks, before long imports, of the models, files and folders that flags name."""

import math
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from collab_heads.base.checks import missing_folder
from collab_heads.errors import ArgumentError, LoadError, OutputError
from collab_heads.files.folders import OLD, alone_in, beside, gguf_at
from collab_heads.files.reading import check_file

MODULES = "modules.json"  # of sentence-transformers: lists the parts of a model and their folders


def check_input(args: Namespace) -> None:
    """Check, before long imports, that the model and the files of texts exist."""
    check_model_name(args.model)
    for name in ("data", "validation", "sentences"):
        check_files(*(file_and_weight(file)[0] for file in getattr(args, name, None) or ()))


def file_and_weight(name: str) -> tuple[str, float | None]:
    """Return the file and its weight in a mixture that an argument names as FILE:WEIGHT; None for a file alone."""
    file, _, number = name.rpartition(":")
    if not file or os.path.exists(name) or not os.path.exists(file):  # what is missing is named as it was given
        return name, None
    try:
        weight = float(number)
    except ValueError:
        return name, None
    if not 0 < weight < math.inf:
        raise ArgumentError(f"{name}: the weight {number} of {file} must be a number above 0")
    return file, weight


def check_model_name(name: str, *, in_llama_cpp: bool = False) -> None:
    """Raise LoadError for a path that does not exist or a folder without a model; other names may be on the Hub.

    Args:
        name: the path, or the name.
        in_llama_cpp: whether files for llama.cpp are models, too.
    """
    folder = Path(name)
    if in_llama_cpp and gguf_at(folder) is not None:
        return
    if os.path.isdir(folder):
        check_folder(folder)
    elif folder.is_absolute() or name.startswith((".", "~")) or len(folder.parts) > 2:
        raise LoadError(f"{missing_folder(name)}: MODEL is a folder, or a name on the Hub")


def check_files(*names: str | None) -> None:
    """Raise DataError if a name is not that of an existing file; None is skipped."""
    for name in names:
        if name is not None:
            check_file(name)


def check_folder(folder: Path) -> None:
    """Raise LoadError for a folder without a model, or one whose model is in a subfolder."""
    if os.path.isfile(folder / "config.json"):
        return
    inner = folder / "0_Transformer"
    if (folder / MODULES).is_file() and inner.is_dir():
        raise LoadError(f"{folder} is of sentence-transformers: the model in it is {inner}, give that")
    if (folder / "adapter_config.json").exists():
        raise LoadError(f"{folder} holds an adapter of PEFT, no model: merge it into its model first, and save that")
    raise LoadError(f"{folder} holds no model: it has no config.json")


def check_output_dir(folder: Path) -> None:
    """Check, before long work, that a folder can be created, or exists and is empty."""
    if not folder.name:
        raise OutputError(f"--output_dir {folder} has no name that another folder could take: give a new one")
    try:
        os.stat(beside(folder, OLD))  # the longest name that will be used
    except (FileNotFoundError, NotADirectoryError):  # the latter is reported below
        pass
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"--output_dir {folder!s:.80} cannot be made: {reason}: choose another") from error
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"--output_dir {folder} is a file")
    if folder.is_dir() and any(folder.iterdir()):
        raise OutputError(f"--output_dir {folder} is in use: choose another, or move what is there")
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise OutputError(f"--output_dir {folder} cannot be made: {there} is not a folder, or you may not write there")


@contextmanager
def reserving(args: Namespace) -> Iterator[None]:
    """Keep other runs from the new folder of a command, from before its work to its end.

    The commands that train reserve their folder themselves, which may be that of an earlier run.
    """
    if getattr(args, "output_dir", None) is None or hasattr(args, "overwrite_output_dir"):
        yield
        return
    with alone_in(args.output_dir):
        check_output_dir(Path(args.output_dir))
        yield


def check_new_model(args: Namespace) -> None:
    """Check that `--output_dir` is given and free."""
    if args.output_dir is None:
        raise ArgumentError("--output_dir is missing: name a new folder for the result")
    check_output_dir(Path(args.output_dir))
