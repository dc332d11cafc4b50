"""A report as one HTML file that needs nothing else: no network, no scripts."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
# whatever a token or a model is called: the page loads nothing, and runs nothing
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid #8888; }
nav ul { columns: 3 12rem; padding-left: 1.2rem; } a { color: inherit; }
.scroll { overflow: auto; max-height: 32rem; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.6rem; border-bottom: 1px solid #8884; text-align: left; white-space: nowrap; }
th { position: sticky; top: 0; background: Canvas; } td.number, th.number { text-align: right; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; background: white; border-radius: 4px; }
@media print { .scroll { overflow: visible; max-height: none; } h2, figure, tr { break-inside: avoid; } }
""".strip()


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title: its heading; also the text of its link and of its pictures.
        legend: what is shown, in plain text.
        table: header and rows, of text.
        pictures: PNG files. An SVG of a large map is many times larger, and its ids could be those of another.
    """

    title: str
    legend: str = ""
    table: Table | None = None
    pictures: Sequence[bytes] = ()


def page(title: str, sections: Sequence[Section]) -> str:
    """One HTML file.

    Args:
        title: of the page, plain text.
        sections: in order.
    """
    links = "".join(f'<li><a href="#s{i}">{escape(each.title)}</a></li>' for i, each in enumerate(sections))
    body = "\n".join(section_html(f"s{i}", each) for i, each in enumerate(sections))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{STYLE}
</style>
</head>
<body>
<h1>{escape(title)}</h1>
<nav aria-label="contents"><ul>{links}</ul></nav>
{body}
</body>
</html>
"""


def section_html(name: str, section: Section) -> str:
    """Heading, legend, table, pictures."""
    parts = [f'<section id="{name}">', f"<h2>{escape(section.title)}</h2>"]
    if section.legend:
        parts.append(f"<p>{escape(section.legend)}</p>")
    if section.table is not None:
        parts.append(table_html(*section.table))
    for number, picture in enumerate(section.pictures, 1):
        image = base64.b64encode(picture).decode()
        alt = escape(f"{section.title}, picture {number} of {len(section.pictures)}", quote=True)
        parts.append(f'<figure><img alt="{alt}" src="data:image/png;base64,{image}"></figure>')
    return "\n".join([*parts, "</section>"])


def table_html(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls where it is long; columns of numbers are aligned to the right."""
    numeric = [all(is_number(row[column]) for row in rows) for column in range(len(header))]
    kinds = [' class="number"' if each else "" for each in numeric]
    head = "".join(f"<th{kind}>{escape(cell)}</th>" for kind, cell in zip(kinds, header, strict=True))
    lines = "".join(
        f"<tr>{''.join(f'<td{kind}>{escape(cell)}</td>' for kind, cell in zip(kinds, row, strict=True))}</tr>\n"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{lines}</tbody></table></div>'


def is_number(cell: str) -> bool:
    """Whether a cell is a number, or empty."""
    try:
        return not cell or float(cell.replace(",", "")) is not None
    except ValueError:
        return False
