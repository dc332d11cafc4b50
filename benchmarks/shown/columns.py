"""Tools for tables of the documentation: rows of a record, columns under readable headings."""

from collections.abc import Callable, Iterable, Mapping

from shown.records import stored

from common import table

# heading -> (key of the row, format); a heading that is its own key needs only the format
Columns = Mapping[str, str | tuple[str, str]]
TABLES: dict[str, Callable[[], str]] = {}


def shown(rows: Iterable[Mapping], columns: Columns) -> str:
    """Return a markdown table of some columns, under headings of the documentation."""
    pairs = {heading: (heading, each) if isinstance(each, str) else each for heading, each in columns.items()}
    renamed = [{heading: row.get(key) for heading, (key, _) in pairs.items()} for row in rows]
    return table(renamed, {heading: spec for heading, (_, spec) in pairs.items()})


def plain(name: str, file: str, columns: Columns, rows: str = "rows") -> None:
    """Register a table that shows the rows of a record unchanged."""
    TABLES[name] = lambda: shown(stored(file)[rows], columns)


def made(function: Callable[[], str]) -> Callable[[], str]:
    """Register a function that makes a table, under its own name."""
    TABLES[function.__name__] = function
    return function


PARAMETERS = {"parameters": ","}
DIFFERENCE = {"difference": "+.2f", "95 %": ""}
TASKS = {"RTE": "rte", "MRPC": "mrpc", "STS-B": "stsb", "CoLA": "cola", "average": "average"}
BLEU = {"BLEU": ("bleu", ".2f")}
AFTER = {"before": ".2f", "BLEU after": ("bleu", ".2f")}
CONTINUED = BLEU | {"range": ""} | DIFFERENCE | PARAMETERS
LOST = {"lost": ".2f", "lost in every draw": ("losses", "")}


def named(rows: list[dict], key: str, names: Mapping[str, str]) -> list[dict]:
    """Replace the names of runs by more readable ones."""
    return [row | {key: names.get(row[key], row[key])} for row in rows]
