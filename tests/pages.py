"""The README and the pages of docs/, their Python examples, links and headings."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from collab_heads.base.extras import is_installed
from collab_heads.compression.parts.table import PARTS
from collab_heads.contract import registry
from collab_heads.fitting.kinds import FITS
from collab_heads.layers.query_key_kinds import QUERY_KEY_KINDS
from collab_heads.sites import state

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# What an example needs beside the install line of its page stands in its first line, for readers and for the tests.
NETWORK = "# needs the network\n"
PACKAGE = re.compile(r"# needs (\w+)\n")
# An example that begins with the name of a file is that file: it is written, and the commands of the page run it.
FILE = re.compile(r"# (\w+\.py)\n")


@dataclass(frozen=True)
class Page:
    """A page of the documentation: its path relative to the repository, and its text."""

    name: str
    text: str

    @property
    def examples(self) -> list[tuple[int, str]]:
        """(line on which the code begins, code) of every Python example."""
        found = re.finditer(r"^```python\n(.*?)^```", self.text, flags=re.DOTALL | re.MULTILINE)
        return [(self.text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]

    @property
    def commands(self) -> list[str]:
        """The commands that run a file of the page."""
        files = [found[1] for _, code in self.examples if (found := FILE.match(code))]
        blocks = re.findall(r"^```bash\n(.*?)^```", self.text, flags=re.DOTALL | re.MULTILINE)
        return [line for block in blocks for line in block.splitlines() if any(file in line.split() for file in files)]

    @property
    def links(self) -> list[str]:
        """What its links and pictures point to, in the repository."""
        outside_code = re.sub(r"^```.*?^```|`[^`\n]*`", "", self.text, flags=re.DOTALL | re.MULTILINE)
        targets = re.findall(r"\]\(([^)\s]+)\)", outside_code)
        return [target for target in targets if not target.startswith(("http:", "https:"))]

    @property
    def anchors(self) -> set[str]:
        """The ids of its headings."""
        headings = re.findall(r"^#+ (.+)$", self.text, flags=re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}

    def extras(self) -> set[str]:
        """The extras that its install lines bring, `.[a,b]`, and other packages that they name."""
        found: set[str] = set()
        for line in re.findall(r"^pip install (.+)$", self.text, flags=re.MULTILINE):
            words = line.split("#")[0].split()
            for word in words:
                found |= set(extras[1].split(",")) if (extras := re.fullmatch(r'"\.\[([\w,]+)\]"', word)) else {word}
        return found


def run(page: Page, *, network: bool) -> list[str]:
    """Run the examples of a page, one after the other in one namespace; returns what was passed over, and why."""
    namespace: dict[str, object] = {"__name__": "page"}
    passed_over = []
    for line, code in page.examples:
        if code.startswith(NETWORK) and not network:
            passed_over.append(f"{page.name}:{line} needs the network (COLLAB_HEADS_NETWORK=1)")
            continue
        if (needed := PACKAGE.match(code)) and not is_installed(needed[1]):
            passed_over.append(f"{page.name}:{line} needs {needed[1]}")
            continue
        if file := FILE.match(code):
            Path(file[1]).write_text(code, encoding="utf-8")
            continue
        exec(compile("\n" * (line - 1) + code, page.name, "exec"), namespace)  # a traceback names the line of the page
    return passed_over


def read() -> Mapping[str, Page]:
    """All pages, by name."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
    names = (str(file.relative_to(ROOT)) for file in files)
    return {name: Page(name, file.read_text(encoding="utf-8")) for name, file in zip(names, files, strict=True)}


PAGES = read()


@contextmanager
def tables_restored() -> Iterator[None]:
    """Forget afterwards what examples entered into the tables of families and kinds."""
    tables = [(table, dict(table)) for table in (registry._ADAPTERS, QUERY_KEY_KINDS, FITS, PARTS)]
    names = state.KINDS, state.DIVIDED
    try:
        yield
    finally:
        state.KINDS, state.DIVIDED = names
        for table, before in tables:
            table.clear()
            table.update(before)
