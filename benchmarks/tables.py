"""Write the tables of the documentation: results from benchmarks/results/, supported models from the adapters.

python benchmarks/tables.py [--check]

A table stands in README.md or a page of docs/ between two lines, and this program writes what is between them:

    <!-- table: stsb -->
    <!-- end -->

Under a table it names the target of make that measures it, and how long that took (`targets.py`).

With --check it changes nothing, and exits with 1 if a table is not what the stored results say.
"""

import argparse
import importlib
import pkgutil
import re
import sys
from pathlib import Path

import shown
from shown.columns import TABLES
from shown.records import USED
from targets import TARGETS, target_of

from common import ROOT

SEVERAL = 2  # targets that a table names
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
for subject in pkgutil.iter_modules(shown.__path__):  # each enters its tables
    importlib.import_module(f"shown.{subject.name}")


def pages() -> list[Path]:
    """Return the README and the pages of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def targets_of(name: str) -> list[str]:
    """Return the targets of make that write what a table shows.

    Raises:
        KeyError: if this program does not make the table.
    """
    USED.clear()
    TABLES[name]()
    return sorted({target for record in USED if (target := target_of(record))})


def written(text: str) -> str:
    """Return a page with its tables filled in from the stored results, and the targets that make them.

    A page names a target once. A table of many targets sums up those of other pages, and names none.

    Raises:
        KeyError: if a page asks for a table that this program does not make.
    """
    named: set[str] = set()

    def filled(marks: re.Match[str]) -> str:
        targets = targets_of(marks[2])
        lines = [f"`make bench-{name}`: {TARGETS[name].takes}.\n\n" for name in targets if name not in named]
        shown = lines if len(targets) <= SEVERAL else []
        named.update(targets if shown else ())
        return f"{marks[1]}\n{TABLES[marks[2]]()}\n\n" + "".join(shown) + marks[3]

    return MARKED.sub(filled, text)


def main() -> None:
    """Write the tables, or check that they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page is not up to date; write nothing")
    arguments = parser.parse_args()
    stale = {page: new for page in pages() if (new := written(old := page.read_text(encoding="utf-8"))) != old}
    names = ", ".join(str(page.relative_to(ROOT)) for page in stale)
    if arguments.check:
        sys.exit(f"tables differ from benchmarks/results/: {names}; run python benchmarks/tables.py" if stale else 0)
    for page, new in stale.items():
        page.write_text(new, encoding="utf-8")
    print(f"written: {names or 'nothing, all are up to date'}")


if __name__ == "__main__":
    main()
