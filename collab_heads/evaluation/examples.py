"""Read the examples of a task: rows, a table, or text files with an example a line, one file for each column."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from collab_heads.base.checks import is_list, shortened
from collab_heads.data.parallel import columns_of, read_lines
from collab_heads.data.tables import is_table, read_table
from collab_heads.errors import ArgumentError, DataError

Data = str | Path | Sequence[str | Path] | Sequence[Mapping]


def read_examples(
    data: Data, names: Sequence[Sequence[str]], columns: Sequence[str] | None
) -> tuple[list[list[str]], str]:
    """Return the columns of a task, [N] texts each, and the name of the data for messages.

    Args:
        data: rows, a table (.tsv, .csv, .json, .jsonl, .parquet), or as many text files as there are columns.
        names: the names that the columns may have, in their order; the first of these that are there count.
        columns: the names instead of these.

    Raises:
        ArgumentError: if it is none of these, or has another number of columns than the task.
        DataError: if a file is missing, damaged or empty, or lacks a column or a text.
    """
    items: list[Any] = list(data) if is_list(data) else [data]
    wanted = list(dict.fromkeys(map(len, names)))
    if columns is not None:
        if len(columns) not in wanted:
            raise ArgumentError(f"{len(columns)} columns ({shortened(columns)}); the task has {words(names)}")
        names = [columns]
    if not items or not all(map(is_row, items)):
        paths = [Path(each) for each in items if isinstance(each, str | PathLike)]
        if not paths or len(paths) < len(items):
            raise ArgumentError(f"data must be a file, several files or a list of dicts, not {data!r:.80}")
        where = " and ".join(map(str, paths))
        if not any(map(is_table, paths)):
            if len(paths) not in wanted:
                raise ArgumentError(f"{where}: {len(paths)} text files; give a table, or a file each of {words(names)}")
            found = [read_lines(path) for path in paths]
            if len(set(map(len, found))) > 1:
                counts = " and ".join(f"{len(lines):,}" for lines in found)
                raise DataError(f"{where} have {counts} lines: they must have an example a line, the same in each")
            return ([[line for line in found[0] if line.strip()]] if len(found) == 1 else found), where
        if len(paths) > 1:
            raise ArgumentError(f"{where}: several files, one of them a table: give one table")
        items = list(read_table(paths[0]))
    else:
        where = "data"
    there = (each for each in names if set(each) <= set(items[0]))
    return columns_of(where, items, next(there, names[0])), where


def is_row(item: object) -> bool:
    """Return True for a dict with names of columns."""
    return isinstance(item, Mapping) and all(isinstance(name, str) for name in item)


def words(names: Sequence[Sequence[str]]) -> str:
    """Return the columns that a task may have, for a message."""
    return ", or ".join(", ".join(each) for each in names)
