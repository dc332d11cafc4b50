"""Copy what makes a transformer a sentence-transformers model: the list of its modules, its settings, its pooling.

A folder of sentence-transformers holds a transformer, and beside it `modules.json` and a folder for every other module.
Without them SentenceTransformer takes the mean over the tokens, whatever the original did. So a changed model takes
these files along from the folder or cached repository that it was loaded from. A classifier that was made from a
sentence encoder gets none of them: its architecture is another one.
"""

import logging
import shutil
from pathlib import Path

from transformers import PretrainedConfig
from transformers.utils import CONFIG_NAME

from collab_heads.errors import DataError
from collab_heads.files.reading import own_file, parse_json, read_text
from collab_heads.saving.marks import auto_map, is_changed
from collab_heads.saving.tokenizer_files import source_of
from collab_heads.sites.record import trimmed_vocabulary

logger = logging.getLogger(__name__)

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
CLASSES = ("SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder")
FILES = (MODULES, SETTINGS, "sentence_*_config.json")
THEIRS = "sentence_transformers."  # module of the classes that come with sentence-transformers


def encoder_class(folder: Path) -> str | None:
    """Return the class of sentence-transformers that loads a folder, or that is saving one there; None for no class."""
    if not any((folder / name).is_file() for name in (MODULES, SETTINGS)):
        return None
    said = stored(folder / SETTINGS, "model_type")  # older folders do not say
    return said if said in CLASSES else CLASSES[0]


def same_source(config: PretrainedConfig) -> Path | None:
    """Return the folder that a model was loaded from, if it has the architecture that is there; else None."""
    if (source := source_of(config)) is None or not config.architectures:
        return None
    if stored(source / CONFIG_NAME, "architectures") == config.architectures:
        return source
    # sentence-transformers loads the base model, also where the config of the folder names another class
    is_base = auto_map(config).get("AutoModel", "").endswith(f".{config.architectures[0]}")
    return source if is_base and (source / MODULES).is_file() else None


def encoder_source(config: PretrainedConfig) -> Path | None:
    """Return the sentence-transformers folder whose transformer a model was loaded from; None for any other model."""
    source = same_source(config)
    return source if source is not None and (source / MODULES).is_file() else None


def stored(file: Path, field: str) -> object:
    """Return a field of a JSON file; None if there is none, or no such file."""
    try:
        return parse_json(read_text(file)).get(field)
    except (DataError, ValueError, AttributeError):
        return None


def bring_modules(config: PretrainedConfig, folder: Path) -> None:
    """Copy the other modules of a changed sentence encoder to its save folder, if no list of modules is there."""
    if not (is_changed(config) or trimmed_vocabulary(config) is not None) or encoder_class(folder):
        return
    source = encoder_source(config)
    if source is None or source.resolve() == folder.resolve():
        return
    try:
        if all(str(module.get("type", THEIRS)).startswith(THEIRS) for module in listed(source)):  # no custom code
            copy_modules(source, folder)
    except (OSError, DataError) as error:
        logger.warning(
            "the modules of sentence-transformers in %s cannot be copied to %s: %s; copy them yourself",
            source,
            folder,
            error,
        )


def copy_modules(source: Path, folder: Path) -> None:
    """Copy what makes a sentence-transformers folder, if it is one: its settings and the folders of other modules.

    Raises:
        DataError: if the list of modules cannot be read, or a file leads out of `source`; nothing is copied then.
    """
    if not (source / MODULES).is_file():
        return
    inside = [own_file(source / module["path"], source) for module in listed(source) if module.get("path")]
    folders = [path for path in inside if path.is_dir()]  # modules without settings have no folder in a repository
    files = sorted(path for pattern in FILES for path in source.glob(pattern))
    for path in (*files, *(path for each in folders for path in each.rglob("*"))):
        own_file(path, source)
    for path in folders:
        shutil.copytree(path, folder / path.relative_to(source), dirs_exist_ok=True)
    for path in files:
        shutil.copyfile(path, folder / path.name)


def listed(source: Path) -> list[dict]:
    """Return the modules that a sentence-transformers folder lists.

    Raises:
        DataError: if the list cannot be read.
    """
    file = source / MODULES
    try:
        modules = parse_json(read_text(file))
    except ValueError as error:
        raise DataError(f"{file}: {error}") from error
    is_list = isinstance(modules, list) and all(isinstance(module, dict) for module in modules)
    if not is_list or not all(isinstance(module.get("path", ""), str) for module in modules):
        raise DataError(f"{file} holds no list of modules and their paths: copy it from the original again")
    return modules
