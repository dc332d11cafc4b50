"""Reports declare their columns; their numbers are ready for JSON."""

import json
from dataclasses import dataclass

import torch

from collab_heads.base.report import Report


@dataclass(frozen=True)
class Row:
    name: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Found(Report):
    TOTALS, ENTRIES = ("total",), "rows"
    rows: tuple[Row, ...]
    values: dict[tuple[str, str], torch.Tensor]

    @property
    def total(self) -> int:
        return sum(map(len, (row.sizes for row in self.rows)))

    def columns(self):
        return {"name": "{.name}", "first": "{0.sizes[0]:,}", "all": lambda row: " ".join(map(str, row.sizes))}

    def closing(self):
        return f"{self.total} sizes"

    def remarks(self):
        return ["", "note: few"]


FOUND = Found((Row("one", (1000, 2)), Row("two", (3,))), {("nsubj", "up"): torch.tensor([0.5, 1.0])})


def test_a_table_with_a_line_and_notes_below_it():
    assert str(FOUND).splitlines() == [
        "name  first  all",
        "----  -----  ------",
        "one   1,000  1000 2",
        "two   3      3",
        "3 sizes",
        "note: few",
    ]


def test_numbers_are_ready_for_json():
    rows = [{"name": "one", "sizes": [1000, 2]}, {"name": "two", "sizes": [3]}]
    assert FOUND.to_dict() == {"total": 3, "rows": rows, "values": {"nsubj up": [0.5, 1.0]}}
    assert json.loads(FOUND.to_json()) == FOUND.to_dict()
