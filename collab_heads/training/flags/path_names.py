"""Names of files and folders on the command line: all flags of the type `path` are guarded."""

import argparse


def inputs(args: argparse.Namespace) -> list[str]:
    """What the run reads: the values of all flags of the type `path`, but for the output folder."""
    values = [value for name, value in vars(args).items() if name != "output_dir"]
    return [each for value in values for each in (value if isinstance(value, list) else [value]) if is_path(each)]


def plain(value):
    """A value as a record has it."""
    return [plain(each) for each in value] if isinstance(value, list) else str(value) if is_path(value) else value


class PathName(str):
    """The name of a file or folder, as given on the command line; of a model or data set it may be one on the Hub."""


def path(text: str) -> PathName:
    """Parse the name of a file or folder: all flags with this type are guarded."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty (a shell variable that is not set?)")
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} has a null byte in it")
    return PathName(text)


def is_path(value: object) -> bool:
    """Whether a value names a file or folder."""
    return isinstance(value, PathName)
