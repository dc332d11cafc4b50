"""Changed models are stored so that they never load silently wrong: what of transformers is wrapped for it.

- before a model is saved its config is brought in line with its modules (`settling`);
- while it is saved its folder is marked as unfinished, and its weights say what record they belong to (`saving`,
  `ties`);
- a config writes the marks of a changed model into its file (`marks`), and beside it the code that `trust_remote_code`
  runs and a section of the model card (`card`);
- before a model is uploaded its card is completed, since transformers puts one of its own there.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, modeling_utils
from transformers.utils import CONFIG_NAME

from collab_heads.model.card import complete
from collab_heads.model.code_file import free_module, write_code
from collab_heads.model.loading_hooks import HOOKS as LOADING_HOOKS
from collab_heads.model.marks import marked
from collab_heads.model.saving import current, saving
from collab_heads.model.settling import settle
from collab_heads.model.ties import sort_metadata
from collab_heads.model.tokenizer_files import bring_tokenizer, take_back

WRAPPED = "collab_heads"  # attribute of a function that is wrapped already


def write_config(stock: Callable, config: PretrainedConfig, json_file_path, *args, **kwargs):
    """Write the file of a config, with the marks of a changed model, or of a save that has not ended."""
    file = Path(json_file_path)
    written = marked(config, free_module(file.parent))
    save = current(file.parent) if file.name == CONFIG_NAME else None
    if save is None:
        return stock(written, json_file_path, *args, **kwargs)
    return save.begin(lambda each, path: stock(each, path, *args, **kwargs), written)


def save_weights(stock: Callable, tensors, filename, metadata=None, *args, **kwargs):
    """Write a file of weights, which says what record it belongs to; that of an adapter, without a config, does not."""
    save, file = current(Path(filename).parent), Path(filename)
    if save is None or save.end is None:
        return stock(tensors, filename, metadata, *args, **kwargs)
    save.files.add(file.name)
    stock(tensors, filename, {**(metadata or {}), **save.metadata}, *args, **kwargs)
    sort_metadata(file)


def save_model(stock: Callable, model: PreTrainedModel, save_directory, *args, **kwargs):
    """Save a model, with a config that says what it is, and the tokenizer that it came with."""
    settle(model)
    with saving(model.config, Path(save_directory), bool(kwargs.get("distributed_checkpoint"))):
        result = stock(model, save_directory, *args, **kwargs)
    bring_tokenizer(model.config, save_directory, *args, **kwargs)
    return result


def save_config(stock: Callable, config: PretrainedConfig, save_directory, *args, **kwargs):
    """Save a config, and what goes beside it."""
    result = stock(config, save_directory, *args, **kwargs)
    write_code(config, Path(save_directory))
    complete(config, Path(save_directory))
    return result


def upload(stock: Callable, model: PreTrainedModel, working_dir, repo_id: str, *args, **kwargs):
    """Upload the files of a model, with a completed card and the config of a save that has ended."""
    if save := current(Path(working_dir)):
        save.finish()
    complete(model.config, Path(working_dir), repo_id)
    take_back(working_dir)
    return stock(model, working_dir, repo_id, *args, **kwargs)


# (where, name of the function) -> (what it must take, the function that is called instead)
HOOKS: dict[tuple[Any, str], tuple[str, Callable]] = {
    **LOADING_HOOKS,
    (modeling_utils, "safe_save_file"): ("metadata", save_weights),
    (PretrainedConfig, "to_json_file"): ("json_file_path", write_config),
    (PretrainedConfig, "save_pretrained"): ("save_directory", save_config),
    (PreTrainedModel, "save_pretrained"): ("save_directory", save_model),
    (PreTrainedModel, "_upload_modified_files"): ("repo_id", upload),
}


def missing_functions() -> list[str]:
    """The functions that this version of transformers lacks, or calls with other arguments."""
    return [
        f"{where.__name__} has no {name}(..., {argument})"
        for (where, name), (argument, _) in HOOKS.items()
        if not callable(found := getattr(where, name, None)) or argument not in inspect.signature(found).parameters
    ]


def install_saving_hooks() -> None:
    """Wrap the functions, once."""
    for (where, name), (_, instead) in HOOKS.items():
        stock, is_static = getattr(where, name), isinstance(inspect.getattr_static(where, name), staticmethod)
        if not hasattr(stock, WRAPPED):
            wrapper = around(stock, instead)
            setattr(where, name, staticmethod(wrapper) if is_static else wrapper)


def around(stock: Callable, instead: Callable) -> Callable:
    """A function that calls `instead` with the stock one and its arguments."""

    @functools.wraps(stock)
    def wrapper(*args, **kwargs):
        return instead(stock, *args, **kwargs)

    setattr(wrapper, WRAPPED, True)
    return wrapper
