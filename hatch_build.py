"""The description of the package on an index: the README, with links that hold there.

An index shows the README without the files beside it. If `[project.urls]` has an address, `Source`, relative links lead
to the files of the release there; else only their texts are shown, and pictures are left out.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
RELATIVE = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<target>[^)\s]+)\)")


def description(readme: str, source: str | None, version: str) -> str:
    """Return the README with absolute links, or without relative ones.

    Args:
        readme: Markdown.
        source: the address of the repository, on GitHub or with the same paths; None if it has none.
        version: of the release, whose tag is `v` and the version.
    """

    def held(link: re.Match) -> str:
        if source is None:
            return "" if link["picture"] else link["text"]
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({source.rstrip('/')}/{kind}/v{version}/{link['target']})"

    parts = FENCED.split(readme)
    return "".join(part if part.startswith("```") else RELATIVE.sub(held, part) for part in parts)


class CustomMetadataHook(MetadataHookInterface):
    """Called by hatchling for every build; `[tool.hatch.metadata.hooks.custom]` names it."""

    def update(self, metadata: dict) -> None:
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = description(readme, metadata.get("urls", {}).get("Source"), metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
