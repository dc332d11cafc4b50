"""The flags that several commands share: the model, the data, how it is run, and the output folder."""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from collab_heads.base.checks import missing_folder
from collab_heads.command.flags.parsing import count_from_1, path, seed, text
from collab_heads.errors import ArgumentError, LoadError, OutputError
from collab_heads.files.folders import OLD, alone_in, beside
from collab_heads.files.reading import check_file

TABLE = "a table (.csv, .tsv, .json, .jsonl, .parquet, also as .gz or .zip)"
MODULES = "modules.json"  # of sentence-transformers: lists the parts of a model and their folders


def add_demo_argument(parser: ArgumentParser, on: str) -> None:
    """Add the flag `--demo`; its value is the number of a row, True for all, or False.

    Args:
        parser: takes the flag.
        on: what the demo works on.
    """
    add, what = parser.add_argument, f"try everything on {on} with a small model"
    again = "with a number, repeat that row of its table; ignores other flags"
    add("--demo", nargs="?", const=True, default=False, type=count_from_1, metavar="ROW", help=f"{what}; {again}")


def demo_row(args: Namespace) -> int | None:
    """Return the number of the row that the demo is to repeat, from 1; None for all rows."""
    return None if args.demo is True else args.demo


def check_demo(args: Namespace) -> bool:
    """Return True if the demo is requested; no other flag has to be checked then.

    Raises:
        ArgumentError: if several processes were started, each of which would run the demo.
    """
    if args.demo and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ArgumentError("--demo is for one process: start it without `accelerate launch` or `torchrun`")
    return bool(args.demo)


def add_model_argument(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder, or name on the Hub, of the model")


def add_data_arguments(parser: ArgumentParser, *, required: bool = True, why: str = "") -> None:
    """Add the flags of the input texts.

    Args:
        parser: takes the flags.
        required: whether the command needs texts.
        why: what the texts are for, if they are optional; begins the help of `--data`.
    """
    add = parser.add_argument
    add(
        "--data",
        nargs="+",
        required=required,
        metavar="FILE",
        help=f"{why}text file with a sentence a line, or {TABLE}; for a translation model also the file of its "
        "translations",
    )
    add(
        "--column",
        nargs="+",
        metavar="NAME",
        help="column of a table that holds the text, or two: text and translation, or pairs that a classifier reads",
    )
    add("--skip_bad_rows", action="store_true", help="leave rows of a .tsv with too many or too few fields out")


def add_sample_arguments(parser: ArgumentParser) -> None:
    """Add the flags for the number of texts to fit to, and the seed that draws them."""
    add = parser.add_argument
    add("--samples", type=count_from_1, default=512, metavar="N", help="sentences to fit to, drawn by the seed")
    add("--seed", type=seed, default=0, metavar="N", help="seed of everything that is random")


def add_running_arguments(parser: ArgumentParser) -> None:
    """Add the flags for running the model: batches, lengths, device."""
    add = parser.add_argument
    add("--batch_size", type=count_from_1, default=32, metavar="N", help="sentences per batch")
    add(
        "--max_length",
        type=count_from_1,
        default=128,
        metavar="N",
        help="cut sentences to this many tokens (word pieces)",
    )
    add_prefix_argument(parser)
    add("--device", default="cpu", metavar="DEVICE", help="where the model runs, such as cuda")
    add_loading_arguments(parser)


def add_prefix_argument(parser: ArgumentParser) -> None:
    """Add the flag for the text before every input."""
    parser.add_argument(
        "--source_prefix", type=text, default="", metavar="TEXT", help="text before every input, as T5 wants it"
    )


def add_loading_arguments(parser: ArgumentParser) -> None:
    """Add the flag for loading the model."""
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the model")


def add_output_argument(parser: ArgumentParser, what: str = "the changed model", default: str | None = None) -> None:
    """Add the flag of the output folder."""
    parser.add_argument(
        "--output_dir", type=path, default=default, metavar="DIR", help=f"folder for {what}; must be new or empty"
    )


def check_input(args: Namespace) -> None:
    """Check, before long imports, that the model and the files of `--data` exist.

    Raises:
        LoadError: if the model is a path that does not exist, or a folder without a model.
        DataError: if a text file is missing.
    """
    check_model_name(args.model)
    check_files(*(getattr(args, "data", None) or ()))


def check_model_name(name: str) -> None:
    """Raise LoadError for a path that does not exist or a folder without a model; other names may be on the Hub."""
    folder = Path(name)
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
    """Check, before long work, that a folder can be created, or exists and is empty.

    Raises:
        OutputError: if it is a file, is not empty, has an invalid or too long name, or nothing may be written there.
    """
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
        raise OutputError(f"--output_dir {folder} cannot be made: {there} is no folder, or you may not write there")


@contextmanager
def reserving(args: Namespace) -> Iterator[None]:
    """Keep other runs from the new folder of a command, from before its work to its end.

    The commands that train reserve their folder themselves, which may be that of an earlier run.

    Raises:
        OutputError: if another run is writing there, or has written there since the flags were checked.
    """
    if getattr(args, "output_dir", None) is None or hasattr(args, "overwrite_output_dir"):
        yield
        return
    with alone_in(args.output_dir):
        check_output_dir(Path(args.output_dir))
        yield


def check_new_model(args: Namespace) -> None:
    """Check that `--output_dir` is given and free.

    Raises:
        ArgumentError: if it is not given.
        OutputError: as `check_output_dir` does.
    """
    if args.output_dir is None:
        raise ArgumentError("--output_dir is missing: a new folder for the changed model")
    check_output_dir(Path(args.output_dir))
