"""Show every notebook of notebooks/ as a page of the site, with the outputs that are stored in it; nothing is run.

mkdocs calls `on_config` and `on_files` (`hooks` in mkdocs.yml). Pages are Markdown like all others, so that code,
links, search and colours are the site's own.
"""

import base64
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

SECTION, BEFORE = "Notebooks", "The scripts"  # where they stand in the navigation
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # colours of a terminal
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


def notebooks(config: MkDocsConfig) -> list[Path]:
    """Return the notebooks of the repository."""
    return sorted((Path(config.docs_dir).parent / "notebooks").glob("*.ipynb"))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Enter the page that lists the notebooks in the navigation."""
    names = [next(iter(entry)) for entry in config.nav or ()]
    if notebooks(config) and BEFORE in names:
        config.nav.insert(names.index(BEFORE), {SECTION: "notebooks/index.md"})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every notebook, its pictures, the notebook itself to take along, and a page that lists them."""
    paths = notebooks(config)
    files.append(File.generated(config, "notebooks/index.md", content=listed(paths)))
    for path in paths:
        pictures: dict[str, bytes] = {}
        text = page(read(path), path.stem, pictures)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def read(path: Path) -> dict[str, Any]:
    """Read a notebook (nbformat 4)."""
    return json.loads(path.read_text(encoding="utf-8"))


def joined(source: str | Sequence[str]) -> str:
    """Return a text of a notebook, which stores it whole or as lines."""
    return source if isinstance(source, str) else "".join(source)


def title(notebook: dict[str, Any]) -> str | None:
    """Return its first heading."""
    texts = (joined(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    return next((found[1] for text in texts if (found := re.search(r"^# (.+)$", text, re.MULTILINE))), None)


def listed(paths: Sequence[Path]) -> str:
    """Return the page that lists all notebooks."""
    lines = [f"- [{title(read(path)) or path.stem}]({path.stem}.md)" for path in paths]
    return f"# {SECTION}\n\nEach is shown with the outputs of its last run.\n\n" + "\n".join(lines) + "\n"


def page(notebook: dict[str, Any], name: str, pictures: dict[str, bytes]) -> str:
    """Return a notebook as Markdown; its pictures are added to `pictures`."""
    parts = [] if title(notebook) else [f"# {name}"]
    for cell in notebook["cells"]:
        text = joined(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(LINK.sub(led, text))
        elif cell["cell_type"] == "code" and text:
            parts.append(fenced(text, "python"))
            parts += shown(cell.get("outputs", ()), name, pictures)
    heading, _, rest = "\n\n".join(parts).partition("\n")
    said = f"*The notebook `notebooks/{name}.ipynb` with the outputs of its last run: [download it]({name}.ipynb).*"
    return f"{heading}\n\n{said}\n\n{rest.strip()}\n"


def led(link: re.Match[str]) -> str:
    """Let a link lead to the page of the site; one that leaves docs/ becomes plain text."""
    mark, text, target = link.groups()
    if target.startswith("../docs/"):
        return f"{mark}[{text}](../{target.removeprefix('../docs/')})"
    return text if target.startswith("../") or not target.endswith(".ipynb") else f"[{text}]({target[:-6]}.md)"


def shown(outputs: Sequence[dict[str, Any]], name: str, pictures: dict[str, bytes]) -> Iterator[str]:
    """Yield the outputs of a cell as Markdown: pictures, Markdown, or text."""
    for output in outputs:
        data = output.get("data", {})
        if picture := data.get("image/png"):
            file = f"{name}-{len(pictures) + 1}.png"
            pictures[file] = base64.b64decode(joined(picture))
            yield f"![{alternative(data)}]({file})"
        elif markdown := data.get("text/markdown"):
            yield joined(markdown)
        elif text := ESCAPES.sub("", joined(output.get("text") or data.get("text/plain") or "")).strip("\n"):
            yield fenced(text, "{ .text .output }")


def alternative(data: dict[str, Any]) -> str:
    """Return what to read in place of a picture."""
    said = joined(data.get("text/plain", ""))
    return "What the cell drew" if said.startswith("<") or not said else said.split("\n")[0]


def fenced(text: str, language: str) -> str:
    """Return a block of code, also where the text holds fences."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
