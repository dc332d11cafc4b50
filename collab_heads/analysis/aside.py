"""Files that are complete or not there."""

import os
from pathlib import Path

PARTIAL = ".partial"


def write_aside(path: str | Path, content: bytes) -> Path:
    """Write a file aside, then rename: a reader never sees half of it. Its folder is made if it is not there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + PARTIAL)
    aside.write_bytes(content)
    os.replace(aside, path)
    return path
