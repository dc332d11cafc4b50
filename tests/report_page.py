"""Read and choose things on the page of a report, in a browser."""

import json

from chromium import Browser

TABLE = "document.querySelector('#all table')"
CANVASES = "document.querySelectorAll('#matrices canvas')"
ACTIVE = "document.activeElement"


def column(page: Browser, name: str) -> list[str]:
    """The cells of a column that are shown."""
    names = page.value(f"[...{TABLE}.tHead.rows[0].cells].map(c => c.textContent)")
    rows = f"[...{TABLE}.tBodies[0].rows].filter(r => !r.hidden)"
    return page.value(f"{rows}.map(r => r.cells[{names.index(name)}].textContent)")


def text(page: Browser, selector: str) -> str:
    return page.value(f"document.querySelector({json.dumps(selector)}).textContent")


def choose(page: Browser, label: str, value) -> None:
    """Choose from a list by its label."""
    page.value(
        f"(() => {{ const l = [...document.querySelectorAll('label')].find(l => l.firstChild.data === '{label}'); "
        f"const s = l.querySelector('select'); s.value = {json.dumps(str(value))}; "
        "s.dispatchEvent(new Event('change')); })()"
    )


def data(page: Browser) -> dict:
    return page.value("JSON.parse(document.getElementById('data').textContent)")


def site_of(page: Browser, head: dict) -> tuple[str, int]:
    """Role and layer of a head."""
    site = data(page)["sites"][head["site"]]
    return site["group"], site["layer"]
