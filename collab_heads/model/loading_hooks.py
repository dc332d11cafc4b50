"""Changed models load with the weights that belong to them: what of transformers is wrapped for it.

- where transformers looks for the weights of a model, our sentence in their place is passed over;
- so it is among the layers that a config asks to be fused, where it stands for those who lose the other (`marks`);
- before weights are loaded they are compared with the record that the model was built from (`ties`).
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, fusion_mapping, modeling_utils

from collab_heads.errors import ConfigError
from collab_heads.layers.output import ConstantOutput, HeadOutputProjection
from collab_heads.model.marks import FUSION, WEIGHTS, is_mark, is_unfinished
from collab_heads.model.ties import check_tie, recorded
from collab_heads.record import STATE

FILES = ("model.safetensors", "model-*.safetensors")  # in this order transformers looks for weights

logger = logging.getLogger(__name__)


def find_weights(stock: Callable, *args, **kwargs):
    """Find the files of the weights, under their usual names if the config holds our sentence."""
    named = kwargs.get("transformers_explicit_filename")
    check_finished([named], kwargs.get("pretrained_model_name_or_path"))
    if is_mark(named):
        kwargs["transformers_explicit_filename"] = None
    return stock(*args, **kwargs)


def fuse(stock: Callable, model_class: type, config: PretrainedConfig, fusion_config: Mapping | None = None):
    """Fuse the layers that a config asks for; our sentence is none."""
    asked = fusion_config or {}
    check_finished(asked, config.name_or_path)
    return stock(model_class, config, {name: how for name, how in asked.items() if not is_mark(name)})


def check_stored(config: PretrainedConfig, folder: Path) -> None:
    """Check what lies in a folder without loading it: that its save has ended, and that its weights are its config's.

    Raises:
        ConfigError: if not; the folder or the file is named.
    """
    check_finished((getattr(config, WEIGHTS, None), *(getattr(config, FUSION, None) or ())), folder)
    check_tie(config, [file for name in FILES for file in sorted(folder.glob(name))][:1])


def check_finished(sentences: Iterable[object], folder: object) -> None:
    """Raise ConfigError if a config says that its save has not ended."""
    if any(map(is_unfinished, sentences)):
        raise ConfigError(
            f"{folder} holds a model whose save did not end, so that its files may belong to two models: save the "
            "model into it again. If a save is under way, wait for its end"
        )


def load_weights(stock: Callable, *args, **kwargs):
    """Load weights into a model, if they belong to what it was built from."""
    given = inspect.signature(stock).bind(*args, **kwargs).arguments
    model, state, files = given["model"], given["state_dict"], given["checkpoint_files"]
    if given.get("expected_keys") is not None:  # of an adapter, which goes into a model that is loaded
        return stock(*args, **kwargs)
    is_known = check_tie(model.config, files or ()) if state is None else not state
    loaded = stock(*args, **kwargs)
    if recorded(model.config) and not is_known:
        check_complete(model, loaded[0], files if state is None else None)
    return loaded


def check_complete(model: PreTrainedModel, loaded: Any, files: list[str] | None) -> None:
    """Check that weights which do not say what they belong to hold all that is changed in a model; warn if they do.

    Raises:
        ConfigError: if something of a changed site is missing, as in the weights of a stock model.
    """
    changed = tuple(
        f"{path}."
        for path, module in model.named_modules(remove_duplicate=False)
        if STATE in vars(module) or isinstance(module, HeadOutputProjection | ConstantOutput)
    )
    whose = "the weights that were given" if files is None else f"the weights in {files[0]}"
    if lost := sorted(name for name in loaded.missing_and_mismatched() if name.startswith(changed)):
        raise ConfigError(
            f"{whose} are not those of a model whose attention is changed as its config records: {lost[0]} is missing "
            f"or has another shape ({len(lost)} of that kind). Load the weights with the config that was saved with "
            "them; to change a stock model, load it with its own config first"
        )
    if files is not None:
        logger.warning(
            "%s do not say which changes of attention they belong to, so whether they fit their config cannot be "
            "checked: they were not written by save_pretrained with collab_heads imported. Save the model with it once",
            whose,
        )


# (where, name of the function) -> (what it must take, the function that is called instead)
HOOKS: dict[tuple[Any, str], tuple[str, Callable]] = {
    (modeling_utils, "_get_resolved_checkpoint_files"): ("transformers_explicit_filename", find_weights),
    (fusion_mapping, "register_fusion_patches"): ("fusion_config", fuse),
    (PreTrainedModel, "_load_pretrained_model"): ("checkpoint_files", load_weights),
}
