"""Head statistics on disk: one safetensors file and one JSON file, complete or not there."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from collab_heads.documents import read_document
from collab_heads.errors import DataError
from collab_heads.files import write_file

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
        DataError: if one is missing, damaged or of another version; the file is named.
    """
    description = read_document(folder / DESCRIPTION, VERSION, "description of head statistics", dict)
    path = folder / TENSORS
    try:
        return load_file(path), description
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{path} is missing or damaged: {error!r}") from error
