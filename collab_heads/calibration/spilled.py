"""Keep calibrations in a temporary file until they are asked for again: a second pass takes longer than to read them.

The file has no name, so the system deletes it when the process ends, however it ends.
"""

import dataclasses
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Hashable, Mapping
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

ON_DISK = "/var/tmp"  # where /tmp often lies in memory
FREE = 2  # times the bytes of all moments that must be free on the disk: recorded calls may take as much again

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """The place of a tensor in the file."""

    start: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Spilled:
    """Structures of dataclasses, mappings and sequences whose tensors lie in a temporary file.

    Args:
        size: the bytes that are expected; nothing is kept where the disk has too little room for them.

    Attributes:
        file: the file; None where nothing is kept.
    """

    def __init__(self, size: int):
        self.structures: dict[Hashable, Any] = {}
        self.file: BinaryIO | None = None
        try:
            folder = large_files()
            if (free := shutil.disk_usage(folder).free) < FREE * size:
                raise OSError(f"{free / 1e6:,.0f} MB of the disk are free, and {FREE * size / 1e6:,.0f} may be needed")
            self.file = tempfile.TemporaryFile(dir=folder)
        except OSError as error:
            self.give_up(error)

    def add(self, key: Hashable, structure: Any) -> None:
        """Write the tensors of a structure; if the disk fails, nothing is kept from then on."""
        if self.file is None:
            return
        try:
            self.structures[key] = with_tensors(structure, self.write)
            self.file.flush()
        except OSError as error:
            self.give_up(error)

    def give_up(self, error: OSError) -> None:
        logger.info("what was calibrated cannot be kept, and is computed twice: %s", error)
        self.structures.clear()
        self.file = None

    def find(self, key: Hashable) -> Any:
        """Return a structure with its tensors, in new memory; None if it is not there."""
        return with_tensors(self.structures[key], self.read) if key in self.structures else None

    def write(self, tensor: Tensor) -> Place:
        assert self.file is not None
        start = self.file.seek(0, os.SEEK_END)
        self.file.write(bytes_of(tensor.detach().cpu().contiguous()))
        return Place(start, tensor.shape, tensor.dtype, tensor.device)

    def read(self, place: Place) -> Tensor:
        assert self.file is not None
        tensor = torch.empty(place.shape, dtype=place.dtype)
        self.file.seek(place.start)
        self.file.readinto(bytes_of(tensor))  # type: ignore[attr-defined]
        return tensor.to(place.device)


def large_files() -> str:
    """Return the folder of large temporary files: that of all such files, or `ON_DISK` for a /tmp that nobody chose."""
    folder = tempfile.gettempdir()
    is_chosen = folder != "/tmp" or "TMPDIR" in os.environ
    return folder if is_chosen or not os.access(ON_DISK, os.W_OK) else ON_DISK


def bytes_of(tensor: Tensor) -> Any:
    """Return the memory of a contiguous tensor, as an array of bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def with_tensors(structure: Any, change: Callable[[Any], Any], seen: dict[int, Any] | None = None) -> Any:
    """Return a structure in which each tensor, or each place of one, is changed; what it held twice, it holds twice.

    Args:
        structure: of dataclasses, mappings, lists and tuples.
        change: returns what takes the place of a tensor or of a place.
        seen: id of a part -> what it became; for calls from within.
    """
    seen = {} if seen is None else seen
    if id(structure) in seen:
        return seen[id(structure)]
    found = structure
    if isinstance(structure, Tensor | Place):
        found = change(structure)
    elif dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        names = [each.name for each in dataclasses.fields(structure)]
        parts = {name: with_tensors(getattr(structure, name), change, seen) for name in names}
        found = dataclasses.replace(structure, **parts)
    elif isinstance(structure, Mapping):
        found = {key: with_tensors(each, change, seen) for key, each in structure.items()}
    elif isinstance(structure, list | tuple):
        found = type(structure)(with_tensors(each, change, seen) for each in structure)
    seen[id(structure)] = found
    return found
