"""What made a result: its examples, the command line and the versions."""

import hashlib
import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata

SECRET = re.compile(r"^(--hub_token=).*")
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "collab-heads")


def provenance() -> dict:
    """What made a result: the command line and the versions."""
    versions = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    return {"command": " ".join(without_token(sys.argv)), "versions": versions}


def version(package: str) -> str | None:
    """The installed version of a package, None where it runs from a plain checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def without_token(argv: Sequence[str]) -> list[str]:
    """A command line with the value of --hub_token masked: results are published, logged and committed."""
    masked = [SECRET.sub(r"\1***", word) for word in argv]
    return ["***" if before == "--hub_token" else word for before, word in zip(["", *argv], masked, strict=False)]


def data_digest(splits: Mapping[str, Mapping[str, list]]) -> str:
    """A short name for the examples: a resumed run must see the same ones."""
    return hashlib.sha256(json.dumps(dict(splits), sort_keys=True).encode()).hexdigest()[:16]
