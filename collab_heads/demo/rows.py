"""The rows of a demo's table: which of them are run, and the command that repeats one."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from collab_heads.errors import ArgumentError


def chosen(names: Sequence[str], row: int | None) -> list[str]:
    """Return the names of the rows to run: all, or the first one, which the others start from, and the one asked for.

    Args:
        names: the names of all rows.
        row: the number of a row, from 1; None for all.

    Raises:
        ArgumentError: if there is no such row.
    """
    if row is None:
        return [*names]
    if row > len(names):
        listed = ", ".join(f"{number} {name}" for number, name in enumerate(names, 1))
        raise ArgumentError(f"--demo {row}: its rows are {listed}")
    return [*dict.fromkeys([names[0], names[row - 1]])]


def repeating(names: Sequence[str], name: str, script: str) -> str:
    """Return the command line that repeats a row, started as this process was.

    Args:
        names: the names of all rows.
        name: the name of the row.
        script: what Python runs, if this process is no demo.
    """
    typed = sys.orig_argv
    words = ["python", script]
    if "--demo" in typed:
        words = [word for word in typed[: typed.index("--demo")] if not word.startswith("--")]
    if len(words) > 1 and (command := shutil.which(Path(words[1]).name)) and Path(command).samefile(words[1]):
        words[:2] = [Path(command).name]  # a command on the path, which starts Python by itself
    return shlex.join([*words, "--demo", str(names.index(name) + 1)])
