"""Show the file CHANGELOG.md as the page of that name.

mkdocs calls `on_page_markdown` (`hooks` in mkdocs.yml).
"""

from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "CHANGELOG.md"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the content of the file for its page, with the links of a page; any other page as it is."""
    if page.file.src_uri != "changelog.md":
        return markdown
    return FILE.read_text(encoding="utf-8").replace("](docs/", "](")
