"""A model that is saved records what it is, whatever happened to its config.

Configs are shared: by a model and its copy (`Student(teacher.config)`), by a task model and the base in it, by whoever
holds one. Layers move from one model to another, or are dropped. So the record is taken from the modules.
"""

import copy
import re

import torch
from transformers import PretrainedConfig, PreTrainedModel

from collab_heads.contract.registry import known_adapter
from collab_heads.errors import UnsupportedModelError
from collab_heads.sites.record import FIELD, STATE, CollabConfig, configs_in, own_configs


def settle(model: PreTrainedModel) -> None:
    """Have the config of a model, and those in it, record what its modules are; shared ones become its own for it.

    Raises:
        UnsupportedModelError: if no config can record it: that of a stack which does not load alone, of a model that
            holds another one without having its config, or of one that holds several which are changed in other ways.
    """
    record, adapter = CollabConfig.on(model), known_adapter(model.config)
    if adapter is None and not hasattr(model.config, FIELD):
        settle_inner(model)
        return
    beside = models_beside(model)
    patterns = (".*",) if adapter is None else adapter.paths
    unknown = [path for path in record.sites if not any(re.fullmatch(pattern, path) for pattern in patterns)]
    if unknown and beside and model.base_model is model:  # its base has a name that is not the family's
        settle_as(model, CollabConfig.on(beside[0][1]))
    elif unknown:
        raise UnsupportedModelError(
            f"the attention of {unknown[0]} in this {type(model).__name__} is changed, and is no site of a "
            f"{model.config.model_type} model that is loaded by itself: save the whole model that has it"
        )
    elif not record.is_in(model):
        record.write(model)
    if any(CollabConfig.on(other) != CollabConfig.of(model.config) for _, other in beside):
        check_built(model)


def settle_as(model: PreTrainedModel, record: CollabConfig) -> None:
    """Have the config of a model record what a model in it is, which is built from the same."""
    if CollabConfig.of(model.config) != record:
        own_configs(model)
        setattr(model.config, FIELD, record.to_dict())


def check_built(model: PreTrainedModel) -> None:
    """Check that what the config of a model builds is as the model is, wherever both have a module.

    Raises:
        UnsupportedModelError: naming a module that would be another one.
    """
    try:
        with torch.device("meta"):
            built = type(model)(copy.deepcopy(model.config))
    except TypeError:  # it is built of more than its config: what else it holds is given to it
        return
    ours = dict(model.named_modules(remove_duplicate=False))
    for path, module in built.named_modules(remove_duplicate=False):
        if path in ours and vars(module).get(STATE) != vars(ours[path]).get(STATE):
            raise UnsupportedModelError(
                f"this {type(model).__name__} holds several {model.config.model_type} models, which one config builds "
                f"alike: {path} would not be loaded as it is; save each model alone, with save_pretrained of its own"
            )


def models_beside(model: PreTrainedModel) -> list[tuple[str, PreTrainedModel]]:
    """The outermost models of a model's own kind in it that are not its base, nor parts of that, and their paths."""
    found: list[tuple[str, PreTrainedModel]] = []
    base = set(model.base_model.modules()) if model.base_model is not model else {model}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, PreTrainedModel) and not inside and module not in base and module is not model:
            if is_alike(module.config, model.config) and has_sites(module):
                found.append((path, module))
    return found


def has_sites(model: PreTrainedModel) -> bool:
    """Whether a model has attention where its family has it, so that it loads alone."""
    adapter = known_adapter(model.config)
    return adapter is not None and bool(adapter.sites(model))


def settle_inner(model: PreTrainedModel) -> None:
    """Settle the models in a model that is of no family itself, and put their records into its config."""
    for path, inner in models_in(model):
        if not (CollabConfig.on(inner).sites or CollabConfig.of(inner.config).sites):
            continue
        name = config_of(model, path, inner)
        settle(inner)
        if CollabConfig.of(configs_in(model.config)[name]) != CollabConfig.of(inner.config):
            own_configs(model)
            setattr(model.config, name, inner.config)


def models_in(model: PreTrainedModel) -> list[tuple[str, PreTrainedModel]]:
    """The outermost models with configs of their own in a model, and their paths."""
    found: list[tuple[str, PreTrainedModel]] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, PreTrainedModel) and not inside and not is_alike(module.config, model.config):
            found.append((path, module))
    return found


def config_of(model: PreTrainedModel, path: str, inner: PreTrainedModel) -> str:
    """The name of the config of a model in a model.

    Raises:
        UnsupportedModelError: if none of those in the config is it.
    """
    there = configs_in(model.config)
    same = [name for name, config in there.items() if config is inner.config]
    alike = [name for name, config in there.items() if is_alike(config, inner.config)]
    named = [name for name in alike if name.removesuffix("_config") in path.split(".")]
    for names in (same, alike, named):
        if len(names) == 1:
            return names[0]
    raise UnsupportedModelError(
        f"the attention of {path} in this {type(model).__name__} is changed, and none of its configs "
        f"({', '.join(there) or 'it has none'}) is known to be that of {path}: save model.get_submodule({path!r}) alone"
    )


def is_alike(config: PretrainedConfig, other: PretrainedConfig) -> bool:
    """Whether two configs are of one kind of model."""
    return type(config) is type(other) and config.model_type == other.model_type
