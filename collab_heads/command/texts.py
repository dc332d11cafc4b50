"""The texts that a command shows a model: lines of text files, or columns of tables."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from collab_heads.errors import ArgumentError, DataError
from collab_heads.training.data.parallel import TABLES, Pairs, read_lines, read_two, without_empty
from collab_heads.training.data.tables import check_columns, read_table, text_of


def read_data(args: Namespace) -> Pairs:
    """Read what the flags name; what is empty is left out, and counted.

    Returns:
        The sentences by "source" and, with two files or two columns, "target".

    Raises:
        DataError: on a file that is missing, empty, damaged or no text, of another length than its partner, or without
            a column.
        ArgumentError: on too many files or columns.
    """
    paths, where = [Path(name) for name in args.data], " and ".join(args.data)
    if len(paths) > 2:
        raise ArgumentError(f"--data has {len(paths)} files: give one of text, or two that are translations")
    if any(is_table(path) for path in paths):
        sides: Sequence[list[str]] = read_columns(args, paths)
    elif args.column:
        raise ArgumentError(f"--column {args.column[0]}: {where} has no columns, it is no table ({', '.join(TABLES)})")
    else:
        sides = read_two(*paths) if len(paths) == 2 else [read_lines(paths[0])]
        for path, lines in zip(paths, sides, strict=True):
            check_text(path, lines)
    if len(sides) == 2:
        return without_empty(where, *sides)[0]
    lines = [line for line in sides[0] if line.strip()]
    if not lines:
        raise DataError(f"{where}: column {args.column[0]!r} has no text")  # a text file without any was refused
    if missing := len(sides[0]) - len(lines):
        print(f"{where}: left out {missing} of {len(sides[0]):,} lines, which are empty")
    return {"source": lines}


def is_table(path: Path) -> bool:
    """Whether a file has columns, by its name."""
    return path.name.removesuffix(".gz").endswith(TABLES)


def read_columns(args: Namespace, paths: Sequence[Path]) -> list[list[str]]:
    """The named columns of a table, one or two."""
    if len(paths) > 1:
        raise ArgumentError(f"--data {paths[0]} {paths[1]}: give one table, and both columns with --column")
    rows = read_table(paths[0], args.skip_bad_rows)
    if not args.column or len(args.column) > 2:
        raise ArgumentError(
            f"{paths[0]} is a table: name the column that holds the text, or two, with --column; "
            f"it has {', '.join(rows[0])}"
        )
    check_columns(paths[0], rows, args.column)
    return [
        [text_of(row[name], f"{paths[0]}, row {number}, column {name!r}") for number, row in enumerate(rows, 1)]
        for name in args.column
    ]


def check_text(path: Path, lines: Sequence[str]) -> None:
    """Raise DataError if a file is no text: null bytes are valid UTF-8, and in no text."""
    for number, line in enumerate(lines, 1):
        if "\0" in line:
            raise DataError(f"{path}, line {number}: a null byte, so it is no text file: give one, in UTF-8")
