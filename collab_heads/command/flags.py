"""The flags that the commands share: which model, on what, where; and the folder that they write."""

import os
from argparse import ArgumentParser
from pathlib import Path

from collab_heads.errors import OutputError
from collab_heads.training.flags.parsing import count_from_1


def add_data_arguments(parser: ArgumentParser) -> None:
    """The model, and the texts that it is shown."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder, or name on the Hub, of the model")
    add(
        "--data",
        nargs="+",
        required=True,
        metavar="FILE",
        help="text file with a sentence a line, or a table (.csv, .tsv, .json, .jsonl); for a translation model also "
        "the file of its translations",
    )
    add(
        "--column",
        nargs="+",
        metavar="NAME",
        help="column of a table that holds the text, or two: text and translation, or pairs that a classifier reads",
    )
    add("--skip_bad_rows", action="store_true", help="leave rows of a .tsv with too many or too few fields out")


def add_running_arguments(parser: ArgumentParser) -> None:
    """How the model is run."""
    add = parser.add_argument
    add("--batch_size", type=count_from_1, default=32, metavar="N", help="sentences per batch")
    add(
        "--max_length",
        type=count_from_1,
        default=128,
        metavar="N",
        help="leave out sentences of more tokens (word pieces)",
    )
    add("--source_prefix", default="", metavar="TEXT", help="text before every input, as T5 wants it")
    add("--device", default="cpu", metavar="DEVICE", help="where the model runs, such as cuda")
    add("--trust_remote_code", action="store_true", help="run Python code that comes with the model")


def check_output_dir(folder: Path) -> None:
    """Check, before long work, that a folder is free and can be made.

    Raises:
        OutputError: if it is a file, holds anything, or lies where nothing may be written.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"--output_dir {folder} is a file")
    if folder.is_dir() and any(folder.iterdir()):
        raise OutputError(f"--output_dir {folder} is in use: choose another, or move what is there")
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise OutputError(f"--output_dir {folder} cannot be made: {there} is no folder, or you may not write there")
