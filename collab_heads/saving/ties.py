"""Tie stored weights to the record that they belong to.

Weights of two changed models may agree in every name and shape: of one that lost head 1, and one that lost head 2. So
the metadata of each file of weights name, by digests, the records that it belongs to, and loading compares them. There
are several: the text model of a CLIP loads alone from the files of the whole model, by the config inside its config.
"""

import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from transformers import PretrainedConfig, PreTrainedModel, fusion_mapping, modeling_utils
from transformers.utils import CONFIG_NAME

from collab_heads.errors import ConfigError
from collab_heads.layers.output import ConstantOutput, HeadOutputProjection
from collab_heads.saving.four_bits import check_four_bits
from collab_heads.saving.layer_configs import SIZES, check_layer_weights
from collab_heads.saving.marks import FOLDER, is_mark, is_unfinished, is_unfinished_config
from collab_heads.saving.vocabularies import VOCABULARY, check_vocabulary
from collab_heads.sites.record import GRIDS, STATE, CollabConfig, configs_in

TIE = "collab_heads"  # in the metadata of a file of weights
SUFFIX = ".safetensors"
SNAPSHOTS = "snapshots"  # folder in the cache of the Hub, with one for each commit
MAX_HEADER = 100_000_000  # bytes; the limit of safetensors
AGAIN = "load it with the config that was saved with it, or save the model again"


def tie(config: PretrainedConfig) -> str:
    """Return a digest of the changes that a config and those inside it record; without any, of its model type."""
    changes = json.dumps(recorded(config) or config.model_type, sort_keys=True)
    return hashlib.sha256(changes.encode()).hexdigest()[:32]


def recorded(config: PretrainedConfig) -> dict:
    """Return the changed sites of a config, and of the changed configs inside it."""
    inner = {name: recorded(each) for name, each in configs_in(config).items()}
    parts = {
        "sites": CollabConfig.alone(config).to_dict()["sites"],
        "configs": {name: each for name, each in inner.items() if each},
        "bits": getattr(config, GRIDS, None),
    }
    return {name: part for name, part in parts.items() if part}


def ties(config: PretrainedConfig) -> set[str]:
    """Return the digests of a config and of those inside it, which load alone from the files of the whole."""
    return {tie(config)}.union(*map(ties, configs_in(config).values()))


def metadata(config: PretrainedConfig) -> dict[str, str]:
    """Return the metadata entries for the weights of a model with this config; empty if it is unchanged."""
    return {TIE: " ".join(sorted(ties(config)))} if recorded(config) else {}


def check_tie(config: PretrainedConfig, files: Iterable[str | Path]) -> bool:
    """Check that files of weights belong to the record of a config.

    Returns:
        True if their metadata say so. Files not written by `save_pretrained`, such as accelerate's, have no such entry.

    Raises:
        ConfigError: if they belong to another record; the file is named.
    """
    wanted, untied = tie(config), []
    apart = getattr(type(config), "extra_files", ())  # that some model types keep beside the weights
    paths = [path for path in map(Path, files) if path.name not in apart]
    for file in paths:
        found = read_metadata(file).get(TIE)
        if found is None:
            untied.append(file)
        elif wanted not in found.split():
            says = "records another change of attention" if recorded(config) else "records no change of attention"
            raise ConfigError(
                f"{file} does not belong to its config: the weights are those of a changed model, and the config "
                f"{says}. A save into {file.parent} may have been interrupted, or one of the two files copied, "
                f"edited or written by another program: {AGAIN}"
            )
    if untied and len(untied) < len(paths):
        if not (untied[0].is_file() and untied[0].stat().st_size):
            raise ConfigError(
                f"{untied[0]} is missing or empty, and the weights beside it need it: bring it again, as after a copy "
                "or a download that did not end"
            )
        raise ConfigError(
            f"{untied[0]} does not belong to the files beside it: these hold the weights of a changed model, and it "
            f"does not. A save into {untied[0].parent} may have been interrupted: save the model again"
        )
    return not untied


def is_tied(file: Path) -> bool:
    return TIE in read_metadata(file)


def read_metadata(file: Path) -> Mapping[str, str]:
    """Return the metadata of a file of weights; empty if it is no such file, an error that is left to its reader."""
    if file.suffix != SUFFIX:
        return {}
    try:
        with file.open("rb") as opened:
            found = read_header(opened).get("__metadata__")
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return {name: text for name, text in found.items() if isinstance(text, str)} if isinstance(found, dict) else {}


def read_header(opened: BinaryIO) -> dict:
    """Return the names, shapes and metadata of a file of weights that was just opened."""
    size = int.from_bytes(opened.read(8), "little")
    if size > MAX_HEADER:
        raise ValueError("it is not a safetensors file")
    return json.loads(opened.read(size))


def sort_metadata(file: Path) -> None:
    """Sort the metadata of a file in place: safetensors writes entries in any order, so files would differ."""
    with file.open("r+b") as opened:
        header = read_header(opened)
        size = opened.tell() - 8
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        if len(text) == size:
            opened.seek(8)
            opened.write(text)


FILES = ("model.safetensors", "model-*.safetensors")  # in the order in which transformers looks for weights
logger = logging.getLogger(__name__)


def find_weights(stock: Callable, *args, **kwargs):
    """Find the files of the weights, under their usual names if the config holds our sentence."""
    named = kwargs.get("transformers_explicit_filename")
    check_finished([named], kwargs.get("pretrained_model_name_or_path"))
    if is_mark(named):
        kwargs["transformers_explicit_filename"] = None
    return stock(*args, **kwargs)


def fuse(stock: Callable, model_class: type, config: PretrainedConfig, fusion_config: Mapping | None = None):
    """Fuse the layers that a config asks for, without our sentence."""
    asked = fusion_config or {}
    if not isinstance(asked, Mapping):  # not ours: transformers says so
        return stock(model_class, config, asked)
    check_finished(asked, config.name_or_path)
    return stock(model_class, config, {name: how for name, how in asked.items() if not is_mark(name)})


def check_stored(config: PretrainedConfig, folder: Path) -> None:
    """Check the files in a folder without loading them: that their save has ended, and that weights and config match.

    Raises:
        ConfigError: if not; the folder or the file is named.
    """
    if is_unfinished_config(config):
        raise_unfinished(folder)
    weights = first_weights(folder)
    check_tie(config, weights)
    check_tokenizer(config, weights)


def first_weights(folder: Path) -> list[Path]:
    return [file for name in FILES for file in sorted(folder.glob(name))][:1]


def check_tokenizer(config: PretrainedConfig, files: Sequence[str | Path]) -> None:
    """Check that the tokenizer beside files of weights is theirs.

    Raises:
        ConfigError: if the model was trimmed, and the tokenizer is another one.
    """
    if files:
        first = Path(files[0])
        check_vocabulary(config, first.parent, read_metadata(first).get(VOCABULARY))


def check_finished(sentences: Iterable[object], folder: object) -> None:
    if any(map(is_unfinished, sentences)):
        raise_unfinished(folder)


def raise_unfinished(folder: object) -> NoReturn:
    raise ConfigError(
        f"{folder} holds a model whose save did not end, so that its files may belong to two models: save the model "
        "into it again. If a save is under way, wait for its end"
    )


def note_folder(config: PretrainedConfig, files: Sequence[str | Path]) -> None:
    """Note in the config of a model from which folder it was loaded, if that is a subfolder of what its name names."""
    folder, named = Path(files[0]).parent, Path(getattr(config, "_name_or_path", ""))
    is_whole = folder.resolve() == named.resolve() if named.is_dir() else folder.parent.name == SNAPSHOTS
    if not is_whole and (folder / CONFIG_NAME).is_file():
        setattr(config, FOLDER, str(folder))


def load_weights(stock: Callable, *args, **kwargs):
    """Load weights into a model, if they belong to the record from which it was built."""
    given = inspect.signature(stock).bind(*args, **kwargs).arguments
    model, state, files = given["model"], given["state_dict"], given["checkpoint_files"]
    if given.get("expected_keys") is not None:  # of an adapter, which goes into a model that is loaded
        return stock(*args, **kwargs)
    is_known = check_tie(model.config, files or ()) if state is None else not state
    check_tokenizer(model.config, (files or ()) if state is None else ())
    loaded = stock(*args, **kwargs)
    if state is None and files:
        note_folder(model.config, files)
    if hasattr(model, SIZES):
        check_layer_weights(model, loaded[0].missing_and_mismatched(), files)
    elif recorded(model.config) and not is_known:
        check_complete(model, loaded[0], files if state is None else None)
    if recorded(model.config):
        check_four_bits(model)
    return loaded


def check_complete(model: PreTrainedModel, loaded: Any, files: list[str] | None) -> None:
    """Check that weights without a digest hold all changed modules of a model; warn if they do.

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
