"""A save that is under way: until it ends, the config in the folder says so, and nothing loads from there.

`save_pretrained` writes the config first and the weights last. Killed between, it would leave the config of one model
with the weights of another, and often they fit. So the first config that is written is marked as that of a save which
has not ended, which every `from_pretrained` refuses; the one without that mark takes its place when all else is there.
Models that are unchanged are saved so where they replace a changed one.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PretrainedConfig
from transformers.utils import CONFIG_NAME

from collab_heads.files import PARTIAL, write_file
from collab_heads.model.marks import is_changed, unfinished
from collab_heads.model.ties import WEIGHTS, is_tied, metadata
from collab_heads.record import FIELD

SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}(\.\w+)")


@dataclass
class Save:
    """A save of a model that is changed, or takes the place of a changed one.

    Attributes:
        folder: into which it goes.
        metadata: of its weights.
        end: writes the config as it is to be; None before there was one to write, or after.
        files: the names of the weights that were written.
        divided: whether the processes write the weights, each its own, unseen.
    """

    folder: Path
    metadata: Mapping[str, str]
    divided: bool = False
    end: Callable[[], None] | None = None
    files: set[str] = field(default_factory=set)

    def begin(self, write: Callable[[PretrainedConfig, Path], None], config: PretrainedConfig) -> None:
        """Write the config of a save that has not ended, and keep for the end what it is to be."""
        self.end = lambda: replace(write, config, self.folder / CONFIG_NAME)
        replace(write, unfinished(config), self.folder / CONFIG_NAME)

    def finish(self) -> None:
        """Write the config as it is to be, once."""
        if self.end is None:
            return
        for parts in filter(None, map(SHARD.fullmatch, self.files)):
            (self.folder / "".join(parts.groups())).unlink(missing_ok=True)  # else loaded in place of the shards
        self.end()
        self.end = None


CURRENT: ContextVar[Save | None] = ContextVar("the save that is under way", default=None)


@contextmanager
def saving(config: PretrainedConfig, folder: Path, divided: bool = False) -> Iterator[None]:
    """While a model is saved: end the save, or put the config back if it failed before a weight was written."""
    save = Save(folder, metadata(config), divided) if is_changed(config) or holds_changed(folder) else None
    file = folder / CONFIG_NAME
    before = file.read_bytes() if save is not None and file.is_file() else None
    token = CURRENT.set(save)
    try:
        yield
        if save is not None:
            save.finish()
    except BaseException:
        if save is not None and save.end is not None and not (save.files or save.divided):
            file.unlink(missing_ok=True) if before is None else write_file(file, before)
        raise
    finally:
        CURRENT.reset(token)


def current(folder: Path) -> Save | None:
    """The save that is under way into a folder."""
    save = CURRENT.get()
    return save if save is not None and save.folder.absolute() == folder.absolute() else None


def holds_changed(folder: Path) -> bool:
    """Whether a changed model lies in a folder, or a part of one."""
    config = folder / CONFIG_NAME
    if config.is_file() and FIELD.encode() in config.read_bytes():
        return True
    return folder.is_dir() and any(map(is_tied, folder.glob(f"*{WEIGHTS}")))


def replace(write: Callable[[PretrainedConfig, Path], None], config: PretrainedConfig, file: Path) -> None:
    """Write the file of a config in one step: a reader sees the old one or the new one."""
    partial = file.with_name(file.name + PARTIAL)
    write(config, partial)
    os.replace(partial, file)
