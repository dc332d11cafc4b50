"""Changed models are stored so that they never load silently wrong: what of transformers is wrapped for it.

- before a model is saved its config is brought in line with its modules (`settling`);
- a config writes the marks of a changed model into its file (`marks`), and beside it the code that `trust_remote_code`
  runs and a section of the model card (`card`);
- where transformers looks for the weights of a model, our sentence in their place is passed over;
- before a model is uploaded its card is completed, since transformers puts one of its own there.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, modeling_utils

from collab_heads.model.card import complete
from collab_heads.model.code_file import free_module, write_code
from collab_heads.model.marks import is_mark, marked
from collab_heads.model.settling import settle
from collab_heads.model.tokenizer_files import bring_tokenizer, take_back

WRAPPED = "collab_heads"  # attribute of a function that is wrapped already


def find_weights(stock: Callable, *args, **kwargs):
    """Find the files of the weights, under their usual names if the config holds our sentence."""
    if is_mark(kwargs.get("transformers_explicit_filename")):
        kwargs["transformers_explicit_filename"] = None
    return stock(*args, **kwargs)


def write_config(stock: Callable, config: PretrainedConfig, json_file_path, *args, **kwargs):
    """Write the file of a config, with the marks of a changed model."""
    written = marked(config, free_module(Path(json_file_path).parent))
    return stock(written, json_file_path, *args, **kwargs)


def save_model(stock: Callable, model: PreTrainedModel, *args, **kwargs):
    """Save a model, with a config that says what it is, and the tokenizer that it came with."""
    settle(model)
    result = stock(model, *args, **kwargs)
    bring_tokenizer(model.config, *args, **kwargs)
    return result


def save_config(stock: Callable, config: PretrainedConfig, save_directory, *args, **kwargs):
    """Save a config, and what goes beside it."""
    result = stock(config, save_directory, *args, **kwargs)
    write_code(config, Path(save_directory))
    complete(config, Path(save_directory))
    return result


def upload(stock: Callable, model: PreTrainedModel, working_dir, repo_id: str, *args, **kwargs):
    """Upload the files of a model, with a completed card."""
    complete(model.config, Path(working_dir), repo_id)
    take_back(working_dir)
    return stock(model, working_dir, repo_id, *args, **kwargs)


# (where, name of the function) -> (what it must take, the function that is called instead)
HOOKS: dict[tuple[Any, str], tuple[str, Callable]] = {
    (modeling_utils, "_get_resolved_checkpoint_files"): ("transformers_explicit_filename", find_weights),
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
        stock = getattr(where, name)
        if not hasattr(stock, WRAPPED):
            setattr(where, name, around(stock, instead))


def around(stock: Callable, instead: Callable) -> Callable:
    """A function that calls `instead` with the stock one and its arguments."""

    @functools.wraps(stock)
    def wrapper(*args, **kwargs):
        return instead(stock, *args, **kwargs)

    setattr(wrapper, WRAPPED, True)
    return wrapper
