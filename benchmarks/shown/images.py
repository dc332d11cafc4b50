"""Tables of the small DeiT on digits."""

from collections.abc import Mapping

from shown.columns import TABLES, made
from shown.records import stored

from common import table


def digits(what: str) -> dict[tuple[str, int], dict]:
    """Return rows of the small DeiT on digits: (mixing, width) -> row."""
    return {(row["mixing"], row["R"]): row for row in stored("digits")["rows"] if row["what"] == what}


def with_range(row: Mapping) -> str:
    """Return the mean over seeds, with the lowest and the highest value."""
    return f"{row['accuracy']:.2f} ({row['range']})"


def born(whole: str, changed: str) -> str:
    """Return models from scratch: shared queries and keys, narrow ones per head, and full width."""
    (full,), found = digits(whole).values(), digits(changed)
    rows = [
        {"R": f"{full['R']}, stock", "stock or per_head": with_range(full), "parameters": f"{full['parameters']:,}"}
    ]
    for width in sorted({width for _, width in found}, reverse=True):
        shared, narrow = found["shared", width], found.get(("per_head", width))
        row = {"R": str(width), "shared": with_range(shared), "parameters": f"{shared['parameters']:,}"}
        if narrow is not None:
            gaps = [one - other for one, other in zip(shared["accuracies"], narrow["accuracies"], strict=True)]
            row["shared over per_head, by seed"] = ", ".join(f"{gap:+.2f}" for gap in gaps)
            row["stock or per_head"] = with_range(narrow)
            row["parameters"] += f" / {narrow['parameters']:,}"
        rows.append(row)
    columns = ("R", "shared", "stock or per_head", "shared over per_head, by seed", "parameters")
    return table(rows, dict.fromkeys(columns, ""))


TABLES["digits_born"] = lambda: born("full", "born")
TABLES["digits_longer"] = lambda: born("full-longer", "longer")


@made
def digits_swapped() -> str:
    """Return trained models right after a swap: from the weights alone, and calibrated."""
    cases = {"weights alone": digits("swapped"), "calibrated": digits("calibrated")}
    widths = sorted({width for _, width in cases["calibrated"]}, reverse=True)
    rows = [
        {"R": str(width)}
        | {
            f"{mixing}, {how}": with_range(found[mixing, width])
            for mixing in ("shared", "per_head")
            for how, found in cases.items()
            if (mixing, width) in found
        }
        for width in widths
    ]
    return table(rows, dict.fromkeys(rows[0], ""))
