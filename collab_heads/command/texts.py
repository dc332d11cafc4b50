"""Read the texts of a command: lines of files, columns of tables, mixtures of both."""

import random
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from collab_heads.base.checks import shortened
from collab_heads.command.places import file_and_weight
from collab_heads.data.parallel import Pairs, columns_of, read_lines, read_two, without_empty
from collab_heads.data.tables import TABLES, is_table, read_table
from collab_heads.errors import ArgumentError, DataError


def read_others(args: Namespace, files: Sequence[str]) -> Pairs:
    """Read other files in the form of `--data`; `--column` is for those that are tables."""
    column = args.column if any(is_table(file_and_weight(name)[0]) for name in files) else None
    return read_data(Namespace(**{**vars(args), "data": files, "column": column}))


def read_data(args: Namespace) -> Pairs:
    """Read the files of `--data`; empty lines are left out, and their number is printed.

    Returns:
        The sentences by "source" and, with two files or two columns, "target".
    """
    files = [file_and_weight(name) for name in args.data]
    paths, weights = [Path(name) for name, _ in files], [weight for _, weight in files if weight is not None]
    if args.column and not any(map(is_table, paths)):
        raise ArgumentError(
            f"--column {args.column[0]}: {' and '.join(args.data)} has no columns, it is not a table "
            f"({', '.join(TABLES)})"
        )
    if len(weights) == len(files):
        if len(args.column or ()) > 1:
            raise ArgumentError(f"--column {' '.join(args.column)}: a mixture is of single texts: name one column")
        return {"source": mixed([read_texts(args, path) for path in paths], weights, args)}
    if weights or len(files) > 2:
        raise ArgumentError(
            f"--data has {len(files)} files, {len(weights)} of them with a weight: give one of text, two that are "
            f"translations, or each with its weight in a mixture ({' '.join(f'{path}:1' for path in paths)})"
        )
    if len(paths) == 2 and not any(map(is_table, paths)):
        return without_empty(" and ".join(args.data), *read_two(*paths))[0]
    if len(paths) > 1:
        raise ArgumentError(f"--data {paths[0]} {paths[1]}: give one table, and both columns with --column")
    if len(args.column or ()) == 2 and is_table(paths[0]):
        return without_empty(args.data[0], *read_columns(args, paths[0]))[0]
    return {"source": read_texts(args, paths[0])}


def read_texts(args: Namespace, path: Path) -> list[str]:
    """Read the lines of a text file, or one column of a table, without those that are empty."""
    if is_table(path):
        (every,) = read_columns(args, path)
    else:
        every = read_lines(path)
    lines = [line for line in every if line.strip()]
    if not lines:
        raise DataError(f"{path}: column {args.column[0]!r} has no text")  # an empty text file was refused above
    if missing := len(every) - len(lines):
        print(f"{path}: left out {missing} of {len(every):,} lines, which are empty")
    return lines


def mixed(sources: Sequence[list[str]], weights: Sequence[float], args: Namespace) -> list[str]:
    """Mix as many texts as their weights allow, in random order, and print their numbers."""
    each = min(len(lines) / weight for lines, weight in zip(sources, weights, strict=True))  # for a weight of 1
    counts = [max(1, round(each * weight)) for weight in weights]
    for name, lines, count in zip(args.data, sources, counts, strict=True):
        print(f"{name}: {count:,} of {len(lines):,} texts")
    generator = random.Random(getattr(args, "seed", 0))
    texts = [line for lines, count in zip(sources, counts, strict=True) for line in generator.sample(lines, count)]
    return generator.sample(texts, len(texts))


def read_columns(args: Namespace, path: Path) -> list[list[str]]:
    """Read one or two named columns of a table."""
    rows = read_table(path, args.skip_bad_rows)
    if not args.column or len(args.column) > 2:
        raise ArgumentError(
            f"{path} is a table: name the column that holds the text, or two, with --column; it has "
            f"{shortened(rows[0])}"
        )
    return columns_of(path, rows, args.column)


def drawn(texts: Pairs, most: int, seed: int) -> Pairs:
    """Draw at most `most` sentences with a seed, and keep their order."""
    size = len(texts["source"])
    chosen = sorted(random.Random(seed).sample(range(size), min(most, size)))
    return {side: [lines[i] for i in chosen] for side, lines in texts.items()}
