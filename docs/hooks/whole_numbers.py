"""Keep a number and what belongs to it on one line: "0.9 %" and "91 → 70".

mkdocs calls `on_page_content` (`hooks` in mkdocs.yml). Code stays as it is, since it is copied.
"""

import re
from typing import Any

CODE_OR_TAG = re.compile(r"(<(pre|code)\b.*?</\2>|<[^>]*>)", re.DOTALL)
SPACE = re.compile(r"(?<=\d) (?=%|→ \d)|(?<=\d →) (?=\d)")
UNBROKEN = "\N{NO-BREAK SPACE}"


def on_page_content(html: str, **_: Any) -> str:
    """Return the content of a page with spaces at which no line breaks."""
    return whole(html)


def whole(html: str) -> str:
    """Replace the spaces inside quantities of a text with tags."""
    found, end = [], 0
    for match in CODE_OR_TAG.finditer(html):
        found += [SPACE.sub(UNBROKEN, html[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*found, SPACE.sub(UNBROKEN, html[end:])])
