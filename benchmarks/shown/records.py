"""Access to the stored records of benchmarks: a whole record, its rows, one row."""

import json

from common import RESULTS

USED: set[str] = set()  # the names of the records that were read


def stored(name: str) -> dict:
    """Read a stored record."""
    USED.add(name)
    return json.loads((RESULTS / f"{name}.json").read_text())


# name of a record -> values of rows that no table shows: a newer record has them, or they were measured wrongly
REPLACED = {
    "glue": ("192", "128"),  # glue_seeds: three seeds
    "nmt_heads": ("encoder, importance 5",),  # nmt_heads_both: three seeds, twice the sentences
    "nmt_mixing": ("manual rotation", "alphas, growth"),  # nmt_mixing_both; a growth 867 times too strong, see its note
}


def current(name: str) -> list[dict]:
    """Return the rows of a record that nothing replaced."""
    return [each for each in stored(name)["rows"] if not set(REPLACED[name]) & set(map(str, each.values()))]


def rows_of(name: str, part: str = "", *, again: int = 0) -> list[dict]:
    """Return the rows of a record, of a part of it, or of its first, second … repetition."""
    record = stored(name)
    return (record["again"][again - 1] if again else record[part] if part else record)["rows"]


def row(name: str, *, again: int = 0, **wanted: object) -> dict:
    """Return the only row with these values, of a record or of a repetition."""
    (found,) = [
        each for each in rows_of(name, again=again) if all(each.get(key) == value for key, value in wanted.items())
    ]
    return found
