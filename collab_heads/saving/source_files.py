"""Bring along what stands beside a model in the folder, or cached repository, that it was loaded from.

A folder with a model but no tokenizer loads without an error: AutoTokenizer makes a vocabulary of special tokens, and
every word is unknown. So a changed model takes the files of its tokenizer or processor along, if its new folder has
none. Files that belong to the model that was saved there before are replaced. A tokenizer that is saved there
afterwards (by Trainer, sentence-transformers or users) replaces all of them, and they are not uploaded together with
the model alone.

A folder of sentence-transformers holds a transformer, and beside it `modules.json` and a folder for every other module.
Without them SentenceTransformer takes the mean over the tokens, whatever the original did. So a changed model takes
these files along, too. A classifier that was made from a sentence encoder gets none of them: its architecture is
another one.
"""

import filecmp
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME

from collab_heads.errors import DataError
from collab_heads.files.atomic import write_file
from collab_heads.files.reading import own_file, parse_json, read_text
from collab_heads.saving.marks import FOLDER, auto_map, is_changed
from collab_heads.saving.ties import first_weights, read_metadata
from collab_heads.saving.vocabularies import (
    VOCABULARY,
    digest,
    fits,
    is_same,
    read_vocabularies,
    tokens_in,
    trimmed_digest,
)
from collab_heads.sites.record import FIELD, TRIMMED

logger = logging.getLogger(__name__)

READ_WITH_OTHERS = (  # by transformers, if a tokenizer of another form is saved in the same folder
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "target_vocab.json",
    "merges.txt",
    "additional_chat_templates/*.jinja",
)
# the last two of sentencepiece; the names without a pattern of PhoBERT, BARTpho, Whisper and FSMT
PATTERNS = (*READ_WITH_OTHERS, "bpe.codes", "dict.txt", "normalizer.json", "vocab*.json", "vocab.*", "*.model", "*.spm")
OF_PROCESSORS = ("*preprocessor_config.json", "processor_config.json")
MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
OF_TEXTS = "sentence_bert_config.json"  # how the transformer of a sentence encoder reads texts; older names are others
OF_ENCODERS = (MODULES, SETTINGS, "sentence_*_config.json")
CLASSES = ("SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder")
RISKY = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".py")  # what runs when it is loaded
THEIRS = "sentence_transformers."  # module of the classes that come with sentence-transformers


def source_of(config: PretrainedConfig) -> Path | None:
    """Return the folder that a model was loaded from, by its path or in the cache of the Hub; None if unknown."""
    if (noted := getattr(config, FOLDER, None)) is not None:  # a subfolder
        return Path(noted) if Path(noted).is_dir() else None
    name = getattr(config, "_name_or_path", "")
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        cached = try_to_load_from_cache(name, CONFIG_NAME, revision=getattr(config, "_commit_hash", None))
    except ValueError:  # not the name of a repository
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def stored(file: Path, field: str) -> object:
    """Return a field of a JSON file; None if there is none, or no such file."""
    try:
        return parse_json(read_text(file)).get(field)
    except (DataError, ValueError, AttributeError):
        return None


@contextmanager
def warning_of_failure(what: str, source: Path, folder: Path) -> Iterator[None]:
    """Make a copy that fails a warning: it never stops the weights."""
    try:
        yield
    except (OSError, ValueError) as error:  # a path with a NUL, a list that cannot be read
        logger.warning(
            "%s in %s cannot be copied to %s: %s; put what is missing there yourself", what, source, folder, error
        )


def bring_tokenizer(
    config: PretrainedConfig, save_directory: str | Path, before: object, is_main_process=True, *_, **__
) -> None:
    """Copy the tokenizer or processor of a changed model to its save folder, if none is there, or another model's.

    Args:
        config: the config of the model.
        save_directory: the folder to which the model was saved.
        before: what `stored_digest` said about this folder before the save.
        is_main_process: as in `save_pretrained`.
    """
    folder = Path(save_directory)
    if not is_main_process or not folder.is_dir():
        return
    if not (is_changed(config) or trimmed_digest(config)):
        warn_of_copies(config, folder, before)
        return
    source, said = known_tokenizer(config)
    if files_in(folder):
        found = read_vocabularies(folder)
        if said is None or found is None or is_same(said, found):
            return
        if source is not None and (is_same(before, found) or not fits(config, found)):
            copy_files(source, folder, PATTERNS)
        else:
            logger.warning(
                "the tokenizer in %s (%s tokens) is not that of the model which was saved there (%s tokens): save its "
                "tokenizer there, too%s",
                folder,
                tokens_in(None, found),
                tokens_in(said),
                "" if trimmed_digest(config) is None else ". Until then the model does not load from this folder",
            )
    elif source is not None and is_changed(config):
        copy_files(source, folder, (*PATTERNS, *OF_PROCESSORS))


def warn_of_copies(config: PretrainedConfig, folder: Path, before: object) -> None:
    """Warn where a stock model replaced a changed one, whose tokenizer stays beside it and is not its own."""
    found = None if before is None else read_vocabularies(folder)
    if found is not None and is_same(before, found):
        said = known_tokenizer(config)[1]
        if not is_same(said, found):
            logger.warning(
                "the tokenizer in %s (%s tokens) is that of the model which was saved there before: save the "
                "tokenizer of this one there, too",
                folder,
                tokens_in(None, found),
            )


def known_tokenizer(config: PretrainedConfig) -> tuple[Path | None, object]:
    """Return the folder that has the tokenizer of a model, and the digest of its vocabulary; None where unknown."""
    source, said = source_of(config), trimmed_digest(config)
    found = None if source is None else read_vocabularies(source)
    if found is None:  # none, or one whose vocabulary cannot be read, which a trimmed model has not
        return (source if said is None else None), said
    stored = said or stored_digest(source)
    if stored is not None and not is_same(stored, found):
        return None, said
    if said is None and not fits(config, found):
        return None, None
    return source, said or digest(found)


def vocabulary_metadata(config: PretrainedConfig) -> dict[str, str]:
    """Return the metadata entry for the weights of a changed model that names its vocabulary; empty if unknown."""
    said = known_tokenizer(config)[1] if is_changed(config) and trimmed_digest(config) is None else None
    return {} if said is None else {VOCABULARY: str(said)}


def stored_digest(folder: Path | None) -> object:
    """Return the digest of the vocabulary that a folder records for its model; None if it records none."""
    if folder is None:
        return None
    said = stored(folder / CONFIG_NAME, TRIMMED)
    if isinstance(said, dict) and said.get("digest") is not None:
        return said["digest"]
    return next((read_metadata(each).get(VOCABULARY) for each in first_weights(folder)), None)


def copy_files(source: Path, folder: Path, patterns: Collection[str]) -> None:
    """Copy the files of a tokenizer to a folder, each in one step, and delete those of another one."""
    found = files_in(source, patterns)
    if any(file.name == "tokenizer_config.json" and b'"auto_map"' in file.read_bytes() for file in found):
        return  # the tokenizer is custom code, which would have to be copied, too
    with warning_of_failure("the tokenizer", source, folder):
        for file in [own_file(each, source) for each in found]:  # all are checked before any is copied
            write_file(folder / file.relative_to(source), file.read_bytes())
        delete_others(folder, names_in(source, found))


def delete_others(folder: Path, names: Collection[str]) -> None:
    """Delete the files of another tokenizer that would be read together with those of these names."""
    for file in files_in(folder, READ_WITH_OTHERS):
        if not names_in(folder, [file]) <= set(names):
            file.unlink()


def files_in(folder: Path, patterns: Collection[str] = (*PATTERNS, *OF_PROCESSORS)) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def names_in(folder: Path, files: Iterable[str | Path]) -> set[str]:
    """Return the names of files relative to their folder."""
    return {Path(os.path.relpath(file, folder)).as_posix() for file in files}


def take_back(config: PretrainedConfig, folder: Path) -> None:
    """Delete the files in a folder that are copies from the source of a model."""
    if (source := source_of(config)) is None:
        return
    for file in files_in(source):
        copied = folder / file.relative_to(source)
        if copied.is_file() and filecmp.cmp(file, copied, shallow=False):
            copied.unlink()


def save_tokenizer(stock: Callable, tokenizer: PreTrainedTokenizerBase, save_directory, *args, **kwargs):
    """Save a tokenizer; beside a changed model, delete the files of another one, which would be read, too."""
    written, folder = stock(tokenizer, save_directory, *args, **kwargs), Path(save_directory)
    if written and not kwargs.get("filename_prefix") and holds_ours(folder):
        delete_others(folder, names_in(folder, written))
    return written


def holds_ours(folder: Path) -> bool:
    config = folder / CONFIG_NAME
    return config.is_file() and any(name.encode() in config.read_bytes() for name in (FIELD, TRIMMED))


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


def bring_modules(config: PretrainedConfig, folder: Path) -> None:
    """Copy the other modules of a sentence encoder to a folder where it was saved, if no list of modules is there."""
    source = encoder_source(config)
    if encoder_class(folder) or source is None or source.resolve() == folder.resolve():
        return
    with warning_of_failure("the modules of sentence-transformers", source, folder):
        if all(str(module.get("type", THEIRS)).startswith(THEIRS) for module in listed(source)):  # no custom code
            copy_modules(source, folder)


def copy_modules(source: Path, folder: Path) -> None:
    """Copy what makes a sentence-transformers folder, if it is one: its settings and the folders of other modules.

    Raises:
        DataError: if the list of modules cannot be read, or a file leads out of `source`; nothing is copied then.
    """
    if not (source / MODULES).is_file():
        return
    modules = listed(source)
    if any(module.get("path") for module in modules if str(module.get("type")).endswith(".Transformer")):
        return  # the model that was loaded is not that of the list
    inside = [own_file(source / module["path"], source) for module in modules if module.get("path")]
    # modules without settings have no folder in a repository, and no module is the whole
    folders = [path for path in inside if path.is_dir() and path.resolve() != source.resolve()]
    files = sorted(path for pattern in OF_ENCODERS for path in source.glob(pattern))
    for path in (*files, *(path for each in folders for path in each.rglob("*"))):
        own_file(path, source)
    if code := sorted({name for each in folders for name in names_in(source, each.rglob("*")) if name.endswith(RISKY)}):
        logger.warning(
            "%s: pickles and code are not copied. Where a module has its weights in one only, store them as "
            "safetensors in the original first (`SentenceTransformer.save`), or copy the file yourself",
            ", ".join(code),
        )
    for path in folders:
        ignored = shutil.ignore_patterns(*(f"*{ending}" for ending in RISKY))
        shutil.copytree(path, folder / path.relative_to(source), dirs_exist_ok=True, ignore=ignored)
    for path in files:
        shutil.copyfile(path, folder / path.name)


def listed(source: Path, name: str = MODULES) -> list[dict]:
    """Return the modules that a sentence-transformers folder lists, in a file of this name.

    Raises:
        DataError: if the list cannot be read.
    """
    file = source / name
    try:
        modules = parse_json(read_text(file))
    except ValueError as error:
        raise DataError(f"{file}: {error}") from error
    is_list = isinstance(modules, list) and all(isinstance(module, dict) for module in modules)
    if not is_list or not all(isinstance(module.get("path", ""), str) for module in modules):
        raise DataError(f"{file} holds no list of modules and their paths: copy it from the original again")
    return modules
