"""The marks in the `config.json` of a changed model, which prevent that it loads silently wrong.

`transformers_weights` is the field in which a config names the file of the weights. In the config of a changed model it
holds a sentence instead of a name. Every `from_pretrained` of transformers 5 refuses it, before any weight is read,
with a ValueError that ends in that sentence; where this package is imported the sentence is ignored (`ties`). Configs
and tokenizers load everywhere, and the weights keep their usual names.

transformers drops that field from a config that is read and saved without this package. It keeps `fusion_config`, which
names layers to fuse, and among them our sentence; this leads to a ValueError, too. Distributed checkpoints are refused
because of `fusion_config` only.

While a save is in progress another sentence stands in both places, which is refused everywhere (`saving`).

`auto_map` names the code that `trust_remote_code=True` runs: a small file beside the config that imports this package.

The marks are written with the file and dropped at loading: a config in use has none.
"""

import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import AutoModel, PretrainedConfig

from collab_heads.base.extras import INSTALL
from collab_heads.files.atomic import write_file
from collab_heads.sites.record import FIELD, GRIDS, configs_in

WEIGHTS, FUSION, CODE = "transformers_weights", "fusion_config", "auto_map"  # fields of a config, of transformers
FOLDER = "_collab_heads_folder"  # of a config in use, where a model was loaded from a subfolder; never written
BEGINNING = "collab_heads changed this model"
SENTENCE = (
    f"{BEGINNING}: {INSTALL}, then `import collab_heads` before it is loaded "
    "(or AutoModel.from_pretrained with trust_remote_code=True)"
)
UNFINISHED = "collab_heads did not finish saving a model here, its files may belong to two models: save it again"
MODULE = "modeling_collab_heads"
MODULES = (MODULE, f"{MODULE}_2")  # the second where a file of its owner has the name of the first


def is_mark(weights: object) -> bool:
    """Return True if a value is our sentence in place of the name of a file of weights, of any version."""
    return isinstance(weights, str) and weights.startswith(BEGINNING)


def is_unfinished(weights: object) -> bool:
    return weights == UNFINISHED


def is_changed(config: PretrainedConfig) -> bool:
    """Return True if a config, or one inside it, records changed sites, or weights on grids."""
    has_record = hasattr(config, FIELD) or hasattr(config, GRIDS)
    return has_record or any(is_changed(inner) for inner in configs_in(config).values())


def marked(config: PretrainedConfig, module: str | None = MODULE) -> PretrainedConfig:
    """Return the config to write: a copy with the marks of a changed model, or without any for an unchanged one.

    Args:
        config: not changed.
        module: the name of the code file for `auto_map`; None for none.
    """
    config = copy.deepcopy(config)
    is_lost = is_unfinished_config(config)
    forget_folder(config)
    unmark(config)
    mark(config)
    theirs = entries(config, CODE)
    has_models = bool(theirs.keys() & {*model_tables(), "AutoConfig"})  # custom code that ours cannot replace
    if is_changed(config) and module and not has_models and (ours := auto_map(config, module)):
        setattr(config, CODE, {**ours, **theirs})
    return unfinished(config) if is_lost else config


def entries(config: PretrainedConfig, name: str) -> Mapping:
    """Return the entries of a field that holds names; none if it holds something else, which transformers reads."""
    found = getattr(config, name, None)
    return found if isinstance(found, Mapping) else {}


def forget_folder(config: PretrainedConfig) -> None:
    vars(config).pop(FOLDER, None)
    for inner in configs_in(config).values():
        forget_folder(inner)


def mark(config: PretrainedConfig) -> None:
    """Put the sentence into a changed config and into those inside it, which load alone from the whole file."""
    for inner in configs_in(config).values():
        mark(inner)
    if is_changed(config):
        set_sentence(config, SENTENCE)


def unfinished(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of a config with the mark of an unfinished save, also in the configs inside it."""
    config = copy.deepcopy(config)
    drop_sentences(config)
    set_sentence(config, UNFINISHED)
    for name, inner in configs_in(config).items():
        setattr(config, name, unfinished(inner))
    return config


def is_unfinished_config(config: PretrainedConfig) -> bool:
    """Return True if a config was read from a folder whose save did not end."""
    return any(map(is_unfinished, (getattr(config, WEIGHTS, None), *entries(config, FUSION))))


def set_sentence(config: PretrainedConfig, sentence: str) -> None:
    setattr(config, WEIGHTS, sentence)
    setattr(config, FUSION, {**entries(config, FUSION), sentence: True})


def unmark(config: PretrainedConfig) -> None:
    """Remove the marks from a config that was read; inner configs are unmarked by the models that they belong to."""
    drop_sentences(config)
    if names_our_code(config):
        theirs = {name: code for name, code in entries(config, CODE).items() if not is_our_code(code)}
        setattr(config, CODE, theirs) if theirs else delattr(config, CODE)


def drop_sentences(config: PretrainedConfig) -> None:
    """Remove our sentences from a config; other layers to fuse stay."""
    if is_sentence(getattr(config, WEIGHTS, None)):
        delattr(config, WEIGHTS)
    fused = entries(config, FUSION)
    if any(map(is_sentence, fused)):
        theirs = {name: how for name, how in fused.items() if not is_sentence(name)}
        setattr(config, FUSION, theirs) if theirs else delattr(config, FUSION)


def is_sentence(text: object) -> bool:
    return is_mark(text) or is_unfinished(text)


def names_our_code(config: PretrainedConfig) -> bool:
    return any(map(is_our_code, entries(config, CODE).values()))


def is_our_code(reference: object) -> bool:
    """Return True if an entry of `auto_map` is ours; from the Hub it reads `owner/name--module.class`."""
    return str(reference).rpartition("--")[2].rpartition(".")[0] in MODULES


def auto_map(config: PretrainedConfig, module: str = MODULE) -> dict[str, str]:
    """Return the entries of `auto_map`: name of an Auto class -> the class of ours for the model that it chooses."""
    chosen = {name: choice(config, table) for name, table in sorted(model_tables().items())}
    return {name: f"{module}.{model}" for name, model in chosen.items() if model is not None}


def model_tables() -> dict[str, Mapping]:
    """Return the table of models of every Auto class, by its name."""
    autos = {name: auto for name, auto in vars(sys.modules[AutoModel.__module__]).items() if name.startswith("Auto")}
    tables = {name: getattr(auto, "_model_mapping", None) for name, auto in autos.items()}
    return {name: table for name, table in tables.items() if table is not None}


def choice(config: PretrainedConfig, table: Mapping) -> str | None:
    """Return the name of the transformers model that a table has for a config.

    It is None if the table has none, if that model has another config class, or if it is not part of transformers.
    """
    if type(config) not in table:
        return None
    models = table[type(config)]
    choices = {model.__name__: model for model in (models if isinstance(models, Sequence) else (models,))}
    name = next((name for name in config.architectures or () if name in choices), next(iter(choices)))
    fits = choices[name].config_class is type(config) and choices[name].__module__.startswith("transformers.")
    return name if fits else None


SOURCE = Path(__file__).parents[1] / f"{MODULE}.py"
OURS = SOURCE.read_bytes().splitlines()[0]  # the first line of our file in every version


def free_module(folder: Path) -> str | None:
    """Return a name under which our code can be written to a folder; None if other files have all names."""
    return next((name for name in MODULES if is_free(folder / f"{name}.py")), None)


def is_free(file: Path) -> bool:
    return is_ours(file) or not (file.exists() or file.is_symlink())


def is_ours(file: Path) -> bool:
    """Return True if a file is our code, of this version or another."""
    return file.is_file() and not file.is_symlink() and file.read_bytes().startswith(OURS)


def write_code(config: PretrainedConfig, folder: Path) -> None:
    """Write the code file that `auto_map` names beside a config, if it is ours, and delete our other ones."""
    module = free_module(folder) if names_our_code(marked(config)) else None
    if module is not None:
        write_file(folder / f"{module}.py", SOURCE.read_bytes())
    for name in MODULES:
        if name != module and is_ours(file := folder / f"{name}.py"):
            file.unlink()
