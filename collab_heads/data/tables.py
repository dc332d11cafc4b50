"""Read tables of examples: GLUE's tab-separated files, CSV and JSON. Errors name the file and the line."""

import csv
import io
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm

from collab_heads.base.checks import did_you_mean
from collab_heads.errors import DataError
from collab_heads.files import reading
from collab_heads.files.reading import check_field, parse_json

Row = dict[str, str]


def read_tsv(path: Path, header: Sequence[str] | None = None, skip_bad_rows: bool = False) -> list[Row]:
    """Read a tab-separated file as GLUE writes them: no quoting, every character counts.

    Args:
        path: the file.
        header: the names of the columns of a file without a header line.
        skip_bad_rows: leave out rows with a wrong number of fields, and print how many (QQP has some).

    Returns:
        A dict of strings per row.

    Raises:
        DataError: on a file that is missing, empty, not UTF-8 or has rows of a wrong length.
    """
    lines = enumerate(read_text(path).split("\n"), 1)
    rows = [(number, line.rstrip("\r").split("\t")) for number, line in lines if line.strip("\r\t ")]
    columns = check_header(path, header or rows.pop(0)[1])
    bad = [(number, row) for number, row in rows if len(row) != len(columns)]
    if bad and (not skip_bad_rows or len(bad) == len(rows)):
        number, row = bad[0]
        raise DataError(
            f"{path}, row {number}: {len(row)} fields, expected {len(columns)} ({', '.join(columns)}); "
            f"{len(bad)} such rows of {len(rows)}: mend the file, or pass --skip_bad_rows"
        )
    if bad:
        tqdm.write(f"{path}: skipped {len(bad)} rows of {len(rows)} with a wrong number of fields")
    return not_empty(path, [dict(zip(columns, row, strict=True)) for _, row in rows if len(row) == len(columns)])


def read_csv(path: Path) -> list[Row]:
    """Read a comma-separated file (RFC 4180) with a header line.

    Raises:
        DataError: on a file that is missing, empty, not UTF-8, has an unclosed quote, or rows of a wrong length.
    """
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    columns: list[str] | None = None
    rows: list[Row] = []
    limit = csv.field_size_limit(sys.maxsize >> 32)  # `check_field` has its own limit
    try:
        for cells in reader:
            if columns is None:
                columns = list(check_header(path, cells)) if cells else None
            elif len(cells) == len(columns):
                rows.append(dict(zip(columns, cells, strict=True)))
            elif cells:
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(cells)} fields, expected {len(columns)} "
                    f"({', '.join(columns)}); fields with commas must stand in double quotes"
                )
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num}: {error} (a quote that is not closed, or one inside a field that is not "
            'doubled as "")'
        ) from error
    finally:
        csv.field_size_limit(limit)
    return not_empty(path, rows)


def read_json(path: Path) -> list[Row]:
    """Read JSON lines, or one JSON list of objects.

    Raises:
        DataError: on a file that is missing, empty or no JSON, or whose rows differ in their columns or hold null.
            Objects and lists in a field are refused later, by `text_of`.
    """
    text = read_text(path)
    whole = text.lstrip().startswith("[")
    rows: list = []
    for number, part in enumerate([text] if whole else text.split("\n")):
        if not part.strip():
            continue
        try:
            parsed = parse_json(part)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number + error.lineno}: {error.msg}") from error
        except ValueError as error:
            raise DataError(f"{path}{'' if whole else f', line {number + 1}'}: {error}") from error
        rows += parsed if whole else [parsed]
    columns = list(rows[0]) if rows and isinstance(rows[0], dict) else []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or row.keys() != set(columns):
            there = ", ".join(row) if isinstance(row, dict) else repr(row)[:80]
            wanted = f" with {', '.join(columns)}" if columns else ""
            raise DataError(f"{path}, row {number}: expected an object{wanted}, found {there}")
        for name, value in row.items():
            if value is None:
                raise DataError(f"{path}, row {number}: no value (null) in column {name!r}")
    return not_empty(path, rows)


def read_table(path: str | Path, skip_bad_rows: bool = False) -> list[Row]:
    """Read a .csv, .tsv, .json or .jsonl file, gzipped where its name ends in `.gz`."""
    path = Path(path)
    suffix = Path(path.name.removesuffix(".gz")).suffix
    tsv = partial(read_tsv, skip_bad_rows=skip_bad_rows)
    readers: dict[str, Callable[[Path], list[Row]]] = {
        ".csv": read_csv,
        ".tsv": tsv,
        ".json": read_json,
        ".jsonl": read_json,
    }
    if suffix not in readers:
        raise DataError(f"{path}: unknown kind of file {suffix!r}; known: {', '.join(readers)}")
    return readers[suffix](path)


def read_text(path: str | Path) -> str:
    """Return the text of a file, gzipped if its name ends in `.gz`; raise DataError if it holds none."""
    text = reading.read_text(path)
    if not text.strip():
        raise DataError(f"{path} is empty")
    return text


def text_of(value: object, where: str) -> str:
    """Return a field as text: text as it is, numbers as they are written.

    Raises:
        DataError: on anything else, such as an object or a list in a JSON file; `where` is file, row and column.
    """
    if not isinstance(value, str | int | float):
        names: dict[type, str] = {dict: "an object", list: "a list"}
        name = names.get(type(value), type(value).__name__)
        raise DataError(f"{where}: {name}, expected text: {str(value)[:80]}")
    return str(value)


def check_header(path: Path, columns: Sequence[str]) -> Sequence[str]:
    """Return the columns; raise DataError if one occurs twice."""
    if twice := sorted({name for name in columns if list(columns).count(name) > 1}):
        raise DataError(f"{path}: its header has {', '.join(map(repr, twice))} more than once")
    return columns


def not_empty(path: Path, rows: list[Row]) -> list[Row]:
    """Return the rows; raise DataError if there are none, or if a field cannot be tokenized."""
    if not rows:
        raise DataError(f"{path} has a header and no rows")
    for number, row in enumerate(rows, 1):
        for name, value in row.items():
            if isinstance(value, str):
                check_field(f"{path}, row {number}", name, value)
    return rows


def check_columns(path: str | Path, rows: Sequence[Row], wanted: Sequence[str]) -> None:
    """Raise DataError if the rows lack a wanted column; the message lists those that they have."""
    for name in wanted:
        if name not in rows[0]:
            raise DataError(
                f"{path} has no column {name!r}{did_you_mean(name, rows[0])}; its columns: {', '.join(rows[0])}"
            )
