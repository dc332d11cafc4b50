"""Reports: numbers for machines (`to_dict`, `to_json`), and for people a table with notes (`str`)."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

Cell = str | Callable[[Any], str]  # a format of an entry, such as "{0.heads_before} -> {0.heads_after}", or a function


class Report:
    """The base of reports, which are dataclasses; they declare the columns of their table and what stands below it."""

    TOTALS: ClassVar[tuple[str, ...]] = ()  # properties that `to_dict` adds to the fields
    ENTRIES: ClassVar[str] = "sites"  # the field with an entry per row of the table

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, ready for JSON."""
        return {name: getattr(self, name) for name in self.TOTALS} | of_fields(self)

    def to_json(self) -> str:
        """Return the numbers of `to_dict` as JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def __str__(self) -> str:
        return "\n".join(filter(None, self.lines()))

    def lines(self) -> list[str]:
        """Return the parts of the text, one below the other."""
        return [table_of(self.columns(), getattr(self, self.ENTRIES), self.closing()), *self.remarks()]

    def columns(self) -> Mapping[str, Cell]:
        """Return the header of every column and the cell of an entry."""
        raise NotImplementedError

    def closing(self) -> str:
        """Return the line below the table."""
        return ""

    def remarks(self) -> list[str]:
        """Return notes for the reader, which stand below that line."""
        return []


def table_of(columns: Mapping[str, Cell], entries: Sequence[Any], closing: str = "") -> str:
    """Return a table with a row per entry, and a line below it."""
    cells = [cell.format if isinstance(cell, str) else cell for cell in columns.values()]
    return text_table(list(columns), [[cell(entry) for cell in cells] for entry in entries], closing)


def cache_column(sites: Sequence[Any]) -> dict[str, Cell]:
    """Return the column of elements cached per token, before and after; none if nothing is cached."""
    if not any(site.cache_before for site in sites):
        return {}
    return {"cache/token": lambda site: f"{site.cache_before} -> {site.cache_after}" if site.cache_before else "-"}


def for_people(cost: float) -> str:
    """Format a cost: a whole number from 1,000 on, else three digits."""
    return f"{cost:,.0f}" if cost >= 1000 else f"{cost:.3g}"


def of_fields(instance: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, ready for JSON."""
    return {field.name: plain(getattr(instance, field.name)) for field in dataclasses.fields(instance)}


def plain(value: Any) -> Any:
    """Return a value of a report, ready for JSON: dictionaries, lists, numbers and text."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return of_fields(value)
    if isinstance(value, Mapping):
        return {" ".join(key) if isinstance(key, tuple) else key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def change(before: int, after: int) -> str:
    """Return a number before and after, and the relative difference."""
    return f"{before:,} -> {after:,} ({after / before - 1:+.1%})"


def portable_name(name: str) -> str:
    """Return the name of a model or file without this machine's folders: the last two parts of an absolute path.

    Any other name is returned unchanged.
    """
    path = Path(name)
    return "/".join(path.parts[1:][-2:]) if path.is_absolute() else name


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], last: str) -> str:
    """Format columns under a header, followed by a closing line."""
    rows = [header, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:], last])


MUCH, MOST = 0.2, 0.5  # shares of an output


SAME_TEXTS = "errors compare only on the same texts"  # of two models


def loss_in_words(share: float) -> str:
    """Return what it means that a share of an output is lost; empty if it is less than a fifth."""
    if share >= MOST:
        return "note: most of the output is lost: without training the model will be of little use"
    if share >= MUCH:
        return "note: much of the output is lost: measure the model on its task before you use it"
    return ""
