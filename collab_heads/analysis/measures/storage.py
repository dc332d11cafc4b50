"""Head statistics on disk: one safetensors file and one JSON file, complete or not there."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from collab_heads.errors import DataError
from collab_heads.files import write_file
from collab_heads.reading import parse_json

TENSORS, DESCRIPTION = "head_statistics.safetensors", "head_statistics.json"
VERSION = 1


def write_statistics(folder: Path, tensors: Mapping[str, Tensor], description: Mapping) -> None:
    """Write both files, each whole or not at all; the JSON file comes last and marks them complete.

    Args:
        folder: made if it is not there; other files in it stay.
        tensors: name -> tensor.
        description: JSON.
    """
    content = save({name: each.contiguous() for name, each in tensors.items()})
    new = write_file(folder / f"{TENSORS}.new", content)  # what is most likely to fail comes before any change
    (folder / DESCRIPTION).unlink(missing_ok=True)  # or an old one would describe the new tensors for a moment
    os.replace(new, folder / TENSORS)
    write_file(folder / DESCRIPTION, (json.dumps({"version": VERSION, **description}) + "\n").encode())


def read_statistics(folder: Path) -> tuple[dict[str, Tensor], dict]:
    """Read both files.

    Returns:
        The tensors by name, and the description.

    Raises:
        DataError: if one is missing, damaged or of a newer version; the file is named.
    """
    path = folder / DESCRIPTION
    try:
        description = parse_json(path.read_text(encoding="utf-8"))
        if description["version"] != VERSION:
            raise DataError(f"{path} is of version {description['version']!r}; this package reads version {VERSION}")
        path = folder / TENSORS
        return load_file(path), description
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(f"{path} is missing or damaged: {error!r}") from error
