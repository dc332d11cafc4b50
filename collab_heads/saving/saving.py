"""Saves in progress: until a save ends, the config in the folder says so, and nothing can be loaded from there.

`save_pretrained` writes the config first and the weights last. If it is killed in between, the folder would hold the
config of one model and the weights of another, which often fit. So the first config that is written is marked as that
of an unfinished save, which every `from_pretrained` refuses. The config without this mark replaces it when everything
else is written. An unchanged model is saved in the same way where it replaces a changed one.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, modeling_utils
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from collab_heads.files.atomic import KEPT, write_file, writing
from collab_heads.files.folders import alone_in
from collab_heads.files.locks import PARTIAL
from collab_heads.model.record_sync import sync_record
from collab_heads.saving.card import README, complete
from collab_heads.saving.grids import note_grids, packs
from collab_heads.saving.marks import MODULES, free_module, is_changed, marked, unfinished, write_code
from collab_heads.saving.source_files import (
    bring_modules,
    bring_tokenizer,
    holds_ours,
    save_tokenizer,
    stored_digest,
    take_back,
    vocabulary_metadata,
)
from collab_heads.saving.ties import SUFFIX, is_tied, metadata, sort_metadata
from collab_heads.sites.record import trimmed_vocabulary

MIXED = "Other files of the weights there are new already: nothing loads from this folder until a save ends"
BEFORE_WEIGHTS = (CONFIG_NAME, GENERATION_CONFIG_NAME, README, *(f"{module}.py" for module in MODULES))
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}(\.\w+)")


@dataclass
class Save:
    """A save of a model that is changed or that replaces a changed one.

    Attributes:
        folder: the folder to which the model is saved.
        metadata: the metadata of its weights.
        end: writes the final config; None before a config was to be written, and after the save has ended.
        files: the names of the files of weights that were written.
        divided: whether each process writes its own part of the weights, without calling our hook.
    """

    folder: Path
    metadata: Mapping[str, str]
    divided: bool = False
    end: Callable[[], None] | None = None
    files: set[str] = field(default_factory=set)

    def begin(self, write: Callable[[PretrainedConfig, Path], None], config: PretrainedConfig) -> None:
        """Write the config with the mark of an unfinished save, and remember how to write the final one."""
        self.end = lambda: replace(write, config, self.folder / CONFIG_NAME)
        replace(write, unfinished(config), self.folder / CONFIG_NAME)

    def finish(self) -> None:
        """Write the final config, once."""
        if self.end is None:
            return
        for parts in filter(None, map(SHARD.fullmatch, self.files)):
            (self.folder / "".join(parts.groups())).unlink(missing_ok=True)  # else loaded in place of the shards
        self.end()
        self.end = None


CURRENT: ContextVar[Save | None] = ContextVar("the save that is under way", default=None)


@contextmanager
def saving(config: PretrainedConfig, folder: Path, divided: bool = False) -> Iterator[None]:
    """Run a save: finish it at the end, or restore the old files if the save failed before any weight was written."""
    said = metadata(config) | vocabulary_metadata(config)
    is_ours = is_changed(config) or trimmed_vocabulary(config) is not None or holds_changed(folder)
    save = Save(folder, said, divided) if is_ours else None
    before: dict[Path, bytes | None] = {}
    for name in BEFORE_WEIGHTS if save is not None else ():
        with suppress(OSError):  # a card that cannot be read stays as it is, and stops no save
            before[folder / name] = content_of(folder / name)
    token = CURRENT.set(save)
    try:
        yield
        if save is not None:
            save.finish()
    except BaseException:
        if save is not None and save.end is not None and not (save.files or save.divided):
            with suppress(OSError):  # a full disk: the mark of an unfinished save stays, and the cause is what counts
                for file, content in before.items():
                    put_back(file, content)
        raise
    finally:
        CURRENT.reset(token)


def content_of(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def put_back(file: Path, content: bytes | None) -> None:
    """Give a file the content that it had; None: there was none."""
    if content is None:
        file.unlink(missing_ok=True)
    elif content_of(file) != content:
        write_file(file, content)


def current(folder: Path) -> Save | None:
    save = CURRENT.get()
    return save if save is not None and save.folder.absolute() == folder.absolute() else None


def holds_changed(folder: Path) -> bool:
    """Return True if a folder holds a changed or trimmed model, or a part of one."""
    return holds_ours(folder) or (folder.is_dir() and any(map(is_tied, folder.glob(f"*{SUFFIX}"))))


def replace(write: Callable[[PretrainedConfig, Path], None], config: PretrainedConfig, file: Path) -> None:
    """Write the file of a config in one step: a reader sees either the old or the new one."""
    partial = file.with_name(file.name + PARTIAL)
    with writing(file):
        partial.unlink(missing_ok=True)  # a link would lead to another file
        try:
            write(config, partial)
            os.replace(partial, file)
        finally:
            partial.unlink(missing_ok=True)


def write_config(stock: Callable, config: PretrainedConfig, json_file_path, *args, **kwargs):
    """Write the file of a config with the marks of a changed model or of an unfinished save."""
    file = Path(json_file_path)
    written = marked(config, free_module(file.parent))
    save = current(file.parent) if file.name == CONFIG_NAME else None
    if save is None:
        return stock(written, json_file_path, *args, **kwargs)
    return save.begin(lambda each, path: stock(each, path, *args, **kwargs), written)


def save_weights(stock: Callable, tensors, filename, metadata=None, *args, **kwargs):
    """Write a file of weights with the record that it belongs to in its metadata.

    The weights of an adapter (PEFT), which are saved without a config, get no such metadata.
    """
    save, file = current(Path(filename).parent), Path(filename)
    if save is None or save.end is None:
        return stock(tensors, filename, metadata, *args, **kwargs)
    before, kept, is_new = state_of(file), MIXED if save.files else KEPT, True
    try:
        with writing(file, sum(tensor.nbytes for tensor in tensors.values()), kept):
            stock(tensors, filename, {**(metadata or {}), **save.metadata}, *args, **kwargs)
            sort_metadata(file)
    except BaseException:
        is_new = state_of(file) != before
        raise
    finally:
        if is_new:
            save.files.add(file.name)


def state_of(file: Path) -> tuple[int, ...] | None:
    """Return what changes when a file is written; None if there is none."""
    if not file.is_file():
        return None
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def save_model(stock: Callable, model: PreTrainedModel, save_directory, *args, **kwargs):
    """Save a model with a config that records its state, and with the tokenizer files that it was loaded with."""
    sync_record(model)
    note_grids(model, may_pack=packs(**kwargs))
    folder = Path(save_directory)
    with alone(model, folder, *args, **kwargs):
        before = stored_digest(folder)
        with saving(model.config, folder, bool(kwargs.get("distributed_checkpoint"))):
            result = stock(model, save_directory, *args, **kwargs)
            bring_tokenizer(model.config, save_directory, before, *args, **kwargs)
    return result


@contextmanager
def alone(model: PreTrainedModel, folder: Path, is_main_process: bool = True, *_, **__) -> Iterator[None]:
    """Keep others from writing a folder while a changed model is saved there, or a stock one over a changed one.

    Of several processes that save one model together the first has the lock.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    is_first = is_main_process and not (distributed and torch.distributed.get_rank())
    with alone_in(folder) if is_first and (is_changed(model.config) or holds_changed(folder)) else nullcontext():
        yield


def save_config(stock: Callable, config: PretrainedConfig, save_directory, *args, **kwargs):
    """Save a config together with the code file, the modules of a sentence encoder and the model card beside it."""
    result = stock(config, save_directory, *args, **kwargs)
    write_code(config, Path(save_directory))
    if is_changed(config) or trimmed_vocabulary(config) is not None:
        bring_modules(config, Path(save_directory))
    complete(config, Path(save_directory))
    return result


def upload(stock: Callable, model: PreTrainedModel, working_dir, repo_id: str, *args, **kwargs):
    """Upload the files of a model, with a completed card and the config of a finished save."""
    if save := current(Path(working_dir)):
        save.finish()
    else:  # a temporary folder of push_to_hub
        take_back(model.config, Path(working_dir))
    complete(model.config, Path(working_dir), repo_id)
    return stock(model, working_dir, repo_id, *args, **kwargs)


# (where, name of the function) -> (what it must take, the function that is called instead)
HOOKS: dict[tuple[Any, str], tuple[str, Callable]] = {
    (modeling_utils, "safe_save_file"): ("metadata", save_weights),
    (PretrainedConfig, "to_json_file"): ("json_file_path", write_config),
    (PretrainedConfig, "save_pretrained"): ("save_directory", save_config),
    (PreTrainedModel, "save_pretrained"): ("save_directory", save_model),
    (PreTrainedModel, "_upload_modified_files"): ("repo_id", upload),
    (PreTrainedTokenizerBase, "save_pretrained"): ("save_directory", save_tokenizer),
}
