"""Read tables of examples: GLUE's tab-separated files, CSV, JSON and Parquet. Errors name the file and the line."""

import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from collab_heads.base.checks import did_you_mean, shortened
from collab_heads.base.extras import check_extra
from collab_heads.errors import DataError
from collab_heads.files import reading
from collab_heads.files.reading import (
    check_field,
    check_unpacked,
    largest_unpacked,
    parse_json,
    read_bytes,
    unpacked_name,
)

Row = dict[str, str]


def read_tsv(path: Path, header: Sequence[str] | None = None, skip_bad_rows: bool = False) -> list[Row]:
    """Read a tab-separated file as GLUE writes them: no quoting, every character counts.

    Args:
        path: the file.
        header: the names of the columns of a file without a header line.
        skip_bad_rows: leave out rows with a wrong number of fields, and print how many (QQP has some).

    Returns:
        A dict of strings per row.
    """
    lines = [line.rstrip("\r") for line in read_text(path).split("\n")]
    full = [number for number, line in enumerate(lines) if line.strip("\t ")]
    rows = [(number + 1, lines[number].split("\t")) for number in range(full[0], full[-1] + 1)]
    columns = check_header(path, header or rows.pop(0)[1])
    # in a table of one column a blank line is an empty text: predictions count the rows of the file
    rows = [(number, row) for number, row in rows if len(row) == len(columns) or "".join(row).strip(" ")]
    bad = [(number, row) for number, row in rows if len(row) != len(columns)]
    if bad and (not skip_bad_rows or len(bad) == len(rows)):
        number, row = bad[0]
        raise DataError(
            f"{path}, row {number}: {len(row)} fields, expected {len(columns)} ({shortened(columns)}); "
            f"{len(bad)} such rows of {len(rows)}: mend the file, or pass --skip_bad_rows"
        )
    if bad:
        tqdm.write(f"{path}: skipped {len(bad)} rows of {len(rows)} with a wrong number of fields")
    return not_empty(path, [dict(zip(columns, row, strict=True)) for _, row in rows if len(row) == len(columns)])


def read_csv(path: Path) -> list[Row]:
    """Read a file of values that commas, semicolons or tabs separate (RFC 4180), with a header line."""
    text = read_text(path).rstrip("\r\n")
    separator = delimiter(text.lstrip().partition("\n")[0])
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    columns: list[str] | None = None
    rows: list[Row] = []
    limit = csv.field_size_limit(sys.maxsize >> 32)  # `check_field` has its own limit
    try:
        for cells in reader:
            if columns is None:
                columns = list(check_header(path, cells)) if cells else None
            elif len(cells) == len(columns):
                rows.append(dict(zip(columns, cells, strict=True)))
            elif len(columns) == 1 and not cells:  # as in `read_tsv`
                rows.append({columns[0]: ""})
            elif cells:
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(cells)} fields, expected {len(columns)} "
                    f"({shortened(columns)}); fields with {SEPARATORS[separator]} must stand in double quotes"
                )
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num}: {error} (a quote that is not closed, or one inside a field that is not "
            'doubled as "")'
        ) from error
    finally:
        csv.field_size_limit(limit)
    return not_empty(path, rows)


SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}


def delimiter(header: str) -> str:
    """Return the character that separates the names in a header line; a comma if there is only one name."""
    try:
        return csv.Sniffer().sniff(header, "".join(SEPARATORS)).delimiter
    except csv.Error:
        return ","


def read_json(path: Path) -> list[Row]:
    """Read JSON lines, one JSON list of objects, or an object that holds such a list as `data`.

    Rows may differ in their keys: `check_columns` refuses those that lack one.
    """
    text = read_text(path)
    try:
        whole = parse_json(text)
        rows = whole.get("data", whole) if isinstance(whole, dict) else whole
        rows = rows if isinstance(rows, list) else [whole]
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":  # which one line after another is
            raise DataError(f"{path}, line {error.lineno}: {error.msg}") from error
        rows = [parsed_line(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {number}: expected an object, found {row!r:.80}")
    return not_empty(path, rows)


def parsed_line(path: Path, number: int, line: str) -> Any:
    """Parse one of several lines of JSON; raises DataError, which names the line."""
    try:
        return parse_json(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number}: {getattr(error, 'msg', error)}") from error


def read_parquet(path: Path) -> list[Row]:
    """Read a Parquet file; it may unpack to as much as `files.reading.read_bytes` allows."""
    check_extra("train", "Parquet files", ("datasets",))
    import pyarrow.parquet

    limit, size, rows = largest_unpacked(path), 0, []
    try:
        with pyarrow.parquet.ParquetFile(io.BytesIO(read_bytes(path))) as file:
            for batch in file.iter_batches(PORTION):
                size += batch.nbytes
                check_unpacked(path, size, limit)
                rows += batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is not a Parquet file, or damaged: {error!s:.200}") from error
    return not_empty(path, rows)


PORTION = 1000  # rows that are unpacked at a time
READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".json": read_json,
    ".jsonl": read_json,
    ".parquet": read_parquet,
}
TABLES = tuple(READERS)


def read_table(path: str | Path, skip_bad_rows: bool = False) -> list[Row]:
    """Read a table; its kind is that of its name, without `.gz`, or of the name of the only file in a `.zip`."""
    path = Path(path)
    suffix = Path(unpacked_name(path)).suffix
    if suffix not in READERS:
        raise DataError(f"{path}: unknown kind of file {suffix!r}; known: {', '.join(READERS)}")
    return read_tsv(path, skip_bad_rows=skip_bad_rows) if suffix == ".tsv" else READERS[suffix](path)


def is_table(path: str | Path) -> bool:
    """Return True if a file is a table by its name, packed or not."""
    return unpacked_name(path).endswith(TABLES)


def read_text(path: str | Path) -> str:
    """Return the text of a file, unpacked as `reading.read_bytes` does; raise DataError if it holds none."""
    text = reading.read_text(path)
    if not text.strip():
        raise DataError(f"{path} is empty")
    return text


def text_of(value: object, where: str) -> str:
    """Return a field as text: text as it is, numbers as they are written."""
    if value is None or value != value:  # NaN
        raise DataError(f"{where}: no value ({'null' if value is None else value}), expected text")
    if not isinstance(value, str | int | float):
        names: dict[type, str] = {dict: "an object", list: "a list"}
        name = names.get(type(value), type(value).__name__)
        raise DataError(f"{where}: {name}, expected text: {value!s:.80}")
    return str(value)


def check_header(path: Path, columns: Sequence[str]) -> Sequence[str]:
    """Return the columns; raise DataError if one occurs twice."""
    if twice := sorted(name for name, count in Counter(columns).items() if count > 1):
        raise DataError(f"{path}: its header has {shortened([repr(name) for name in twice])} more than once")
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


def check_columns(path: str | Path, rows: Sequence[Mapping], wanted: Sequence[str]) -> None:
    """Raise DataError if a row lacks a wanted column; the message lists those that it has."""
    for name in wanted:
        for number, row in enumerate(rows, 1):
            if name not in row:
                where = path if number == 1 else f"{path}, row {number}"
                raise DataError(
                    f"{where} has no column {name!r}{did_you_mean(name, row)}; its columns: {shortened(row)}"
                )
