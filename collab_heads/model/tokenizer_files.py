"""Copy the files of a tokenizer or processor from the source of a changed model to where the model is saved.

A folder with a model but no tokenizer loads without an error: AutoTokenizer makes a vocabulary of special tokens, and
every word is unknown. So a changed model takes these files along from the folder or cached repository that it was
loaded from, if its new folder has none. They are replaced if a tokenizer is saved there afterwards (by Trainer,
sentence-transformers or users), and they are not uploaded together with the model alone.
"""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from collab_heads.errors import DataError
from collab_heads.files.reading import own_file
from collab_heads.model.marks import is_changed
from collab_heads.sites.record import trimmed_vocabulary

logger = logging.getLogger(__name__)

PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "vocab.*",
    "merges.txt",
    "*.model",  # of sentencepiece
    "*.spm",
    "*preprocessor_config.json",
    "processor_config.json",
)
_brought: dict[Path, dict[Path, int]] = {}  # folder -> file that was copied there -> when it was written


def bring_tokenizer(config: PretrainedConfig, save_directory: str | Path, is_main_process=True, *_, **__) -> None:
    """Copy the files of the tokenizer or processor of a changed model to its save folder, if none are there.

    Args:
        config: the config of the model.
        save_directory: the folder to which the model was saved.
        is_main_process: as in `save_pretrained`.
    """
    folder = Path(save_directory)
    if not is_main_process or not is_changed(config) or not folder.is_dir() or files_in(folder):
        return
    if trimmed_vocabulary(config) is not None:  # the source has a tokenizer of more tokens
        return
    source = source_of(config)
    found = [] if source is None else files_in(source)
    if any(file.name == "tokenizer_config.json" and b'"auto_map"' in file.read_bytes() for file in found):
        return  # the tokenizer is custom code, which would have to be copied, too
    try:
        found = [own_file(file, file.parent) for file in found]
        copies = [Path(shutil.copyfile(file, folder / file.name)) for file in found]
    except (OSError, DataError) as error:
        logger.warning("the tokenizer in %s cannot be copied to %s: %s; save it there yourself", source, folder, error)
        return
    _brought[folder.resolve()] = {file: file.stat().st_mtime_ns for file in copies}


def files_in(folder: Path) -> list[Path]:
    """Return the files of a tokenizer or processor in a folder."""
    return sorted(file for pattern in PATTERNS for file in folder.glob(pattern) if file.is_file())


def source_of(config: PretrainedConfig) -> Path | None:
    """Return the folder that a model was loaded from, by its path or in the cache of the Hub; None if unknown."""
    name = getattr(config, "_name_or_path", "")
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        cached = try_to_load_from_cache(name, "config.json", revision=getattr(config, "_commit_hash", None))
    except ValueError:  # not the name of a repository
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def take_back(folder: str | Path) -> None:
    """Delete the files that were copied into a folder, unless they were changed since."""
    for file, written in _brought.pop(Path(folder).resolve(), {}).items():
        if file.is_file() and file.stat().st_mtime_ns == written:
            file.unlink()


def save_tokenizer(stock: Callable, tokenizer: PreTrainedTokenizerBase, save_directory, *args, **kwargs):
    """Save a tokenizer, after deleting the copied files: a file left from another tokenizer would be read, too."""
    take_back(save_directory)
    return stock(tokenizer, save_directory, *args, **kwargs)
