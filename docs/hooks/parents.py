"""Begin a page outside the sidebar with a link to the page that lists its folder.

mkdocs calls `on_page_markdown` (`hooks` in mkdocs.yml).
"""

from typing import Any

from mkdocs.structure.pages import Page

LISTS = {"results": "Results", "reference": "Reference", "examples": "Examples", "notebooks": "Notebooks"}


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return the text of a page, with the link if the page is in no entry of the navigation."""
    folder, _, name = page.file.src_uri.rpartition("/")
    if page.parent is not None or name == "index.md" or folder not in LISTS:
        return markdown
    heading, _, rest = markdown.partition("\n")  # a page has its title from a heading in its first line
    return f"{heading}\n\nPart of [{LISTS[folder]}](index.md).\n{rest}"
