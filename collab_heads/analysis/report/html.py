"""A report as one self-contained HTML file: no network, and no script but its own."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from string import Template

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
SMALL = 700  # pixels of a picture that can be read on a phone
WIDE = 1700  # pixels of a picture that cannot be read when it is as wide as the page: the figures are 11 inches at most
FOLDER = files("collab_heads.analysis.report") / "page"
# in the order in which they build on each other
SCRIPTS = (
    *("data", "words", "elements", "colours", "state", "filters", "table", "maps", "links", "sentence", "matrices"),
    *("labelled", "head", "anchors", "copy", "start"),
)
# whatever a token or a model is called: the page loads nothing, and runs nothing but the script of this hash
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{hash}'; base-uri 'none'; "
    "form-action 'none'"
)


@dataclass(frozen=True)
class Drawing:
    """A picture on the page.

    Attributes:
        png: the PNG file. An SVG of a large map is many times larger, and its ids could clash with those of another.
        alt: a description of the picture for those who do not see it.
    """

    png: bytes
    alt: str


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title: its heading, and the text of its link.
        legend: an explanation, in plain text.
        table: header and rows of text.
        pictures: the pictures below the table.
        name: its id; None for one by position.
        html: other content, as HTML, above the table.
        ids: an id per row of the table, for links; empty for none.
    """

    title: str
    legend: str = ""
    table: Table | None = None
    pictures: Sequence[Drawing] = ()
    name: str | None = None
    html: str = ""
    ids: Sequence[str] = ()


@cache
def part(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


@cache
def script() -> str:
    """Return the page's script: all files in one function, so that their names stay local."""
    return "(() => {\n" + "\n".join(part(f"{name}.js") for name in SCRIPTS) + "})();\n"


def page(
    title: str, sections: Sequence[Section], data: str = "{}", lead: Sequence[str] = (), warnings: Sequence[str] = ()
) -> str:
    """Return one HTML file."""
    named = [(each.name or f"s{i}", each) for i, each in enumerate(sections)]
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return Template(part("page.html")).substitute(
        policy=POLICY.format(hash=digest),
        title=escape(title),
        lead="\n".join(
            f'<p class="{kind}">{escape(line)}</p>'
            for kind, lines in (("lead", lead), ("warning", warnings))
            for line in lines
        ),
        style=part("page.css"),
        links="".join(f'<li><a href="#{name}">{escape(each.title)}</a></li>' for name, each in named),
        body="\n".join(section_html(name, each) for name, each in named),
        data=data,
        script=script(),
    )


def section_html(name: str, section: Section) -> str:
    parts = [f'<section id="{name}">', f"<h2>{escape(section.title)}</h2>"]
    if section.legend:
        parts.append(f"<p>{escape(section.legend)}</p>")
    parts.append(section.html)
    if section.table is not None:
        parts.append(table_html(*section.table, label=section.title, ids=section.ids))
    for picture in section.pictures:
        parts.append(figure_html(picture))
    return "\n".join([*filter(None, parts), "</section>"])


def figure_html(picture: Drawing) -> str:
    """Return a picture; a wide one scrolls in its own box."""
    width = int.from_bytes(picture.png[16:20], "big")  # where a PNG file has it
    data = base64.b64encode(picture.png).decode()
    image = f'<img alt="{escape(picture.alt, quote=True)}" src="data:image/png;base64,{data}">'
    if width <= SMALL:
        return f"<figure>{image}</figure>"
    kind = "wide" if width > WIDE else "broad"
    return f'<figure class="{kind}" tabindex="0">{image}</figure>'  # where it scrolls, it must be reached by keyboard


def table_html(header: Sequence[str], rows: Sequence[Sequence[str]], label: str = "", ids: Sequence[str] = ()) -> str:
    """Return a table that scrolls if it is long; columns of numbers are aligned to the right."""
    named_rows = [f' id="{escape(each, quote=True)}"' for each in ids] or [""] * len(rows)
    numeric = [all(is_number(row[column]) for row in rows) for column in range(len(header))]
    kinds = [' class="number"' if each else "" for each in numeric]
    named = zip(kinds, header, strict=True)
    head = "".join(f'<th scope="col"{kind}>{escape(cell)}</th>' for kind, cell in named)
    lines = "".join(
        f"<tr{name}>{''.join(f'<td{kind}>{escape(cell)}</td>' for kind, cell in zip(kinds, row, strict=True))}</tr>\n"
        for name, row in zip(named_rows, rows, strict=True)
    )
    # a part that scrolls must be reached by keyboard, and then have a name
    where = f'class="scroll" tabindex="0" role="region" aria-label="{escape(label, quote=True)}: table"'
    return f"<div {where}><table><thead><tr>{head}</tr></thead>\n<tbody>\n{lines}</tbody></table></div>"


def is_number(cell: str) -> bool:
    try:
        return not cell or float(cell.replace(",", "").removesuffix("%")) is not None
    except ValueError:
        return False
