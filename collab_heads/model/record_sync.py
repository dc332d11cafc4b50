"""Bring the configs of a model in line with its modules before it is saved.

Configs are shared: by a model and its copy (`Student(teacher.config)`), by a task model and its base model, by any
other object that holds one. Layers move from one model to another, or are dropped. So the record of the changes is
taken from the modules.
"""

import copy

import torch
from transformers import PretrainedConfig, PreTrainedModel

from collab_heads.contract.registry import known_adapter
from collab_heads.errors import UnsupportedModelError
from collab_heads.sites.record import FIELD, STATE, CollabConfig, configs_in, own_configs


def sync_record(model: PreTrainedModel, record: CollabConfig | None = None) -> None:
    """Make the config of a model, and those inside it, record its modules; shared configs are copied first.

    Args:
        model: the model.
        record: the record of its modules, where it is known.

    Raises:
        UnsupportedModelError: if no config can record this state: of a stack that cannot be loaded alone, of a model
            that holds another one without having its config, or of one that holds several models with different
            changes.
    """
    record, adapter = CollabConfig.on(model) if record is None else record, known_adapter(model.config)
    if adapter is None and not hasattr(model.config, FIELD):
        settle_inner(model)
        return
    beside = models_beside(model)
    unknown = [path for path, state in record.states.items() if adapter is not None and not adapter.knows(path, state)]
    if unknown and beside and model.base_model is model:  # its base has a name that is not the family's
        settle_as(model, CollabConfig.on(beside[0][1]))
    elif unknown:
        raise UnsupportedModelError(
            f"{unknown[0]} in this {type(model).__name__} is changed, and is not a site of a "
            f"{model.config.model_type} model that is loaded by itself: save the whole model that has it"
        )
    elif not record.is_in(model):
        record.write(model, before=record)
    if any(CollabConfig.on(other) != CollabConfig.of(model.config) for _, other in beside):
        check_built(model)


def settle_as(model: PreTrainedModel, record: CollabConfig) -> None:
    """Make the config of a model record the state of a model inside it that is built from the same config."""
    if CollabConfig.of(model.config) != record:
        own_configs(model)
        setattr(model.config, FIELD, record.to_dict())


def check_built(model: PreTrainedModel) -> None:
    """Check that a model built from the config has the recorded state of the model, for every module that both have.

    Raises:
        UnsupportedModelError: naming a module that would differ.
    """
    try:
        with torch.device("meta"):
            built = type(model)(copy.deepcopy(model.config))
    except TypeError:  # it takes more than a config, so the models in it are passed to it
        return
    ours = dict(model.named_modules(remove_duplicate=False))
    for path, module in built.named_modules(remove_duplicate=False):
        if path in ours and vars(module).get(STATE) != vars(ours[path]).get(STATE):
            raise UnsupportedModelError(
                f"this {type(model).__name__} holds several {model.config.model_type} models, which one config builds "
                f"alike: {path} would not be loaded as it is; save each model alone, with save_pretrained of its own"
            )


def models_beside(model: PreTrainedModel) -> list[tuple[str, PreTrainedModel]]:
    """Return the outermost inner models of the same kind outside the base model, with their paths."""
    found: list[tuple[str, PreTrainedModel]] = []
    base = set(model.base_model.modules()) if model.base_model is not model else {model}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, PreTrainedModel) and not inside and module not in base and module is not model:
            if is_alike(module.config, model.config) and has_sites(module):
                found.append((path, module))
    return found


def has_sites(model: PreTrainedModel) -> bool:
    """Return True if a model has attention where its family has it, so that it can be loaded alone."""
    adapter = known_adapter(model.config)
    return adapter is not None and bool(adapter.sites(model))


def settle_inner(model: PreTrainedModel) -> None:
    """Settle the models inside a model that is of no known family, and put their records into its config."""
    for path, inner in models_in(model):
        if not (CollabConfig.on(inner).states or CollabConfig.of(inner.config).states):
            continue
        name = config_of(model, path, inner)
        sync_record(inner)
        if CollabConfig.of(configs_in(model.config)[name]) != CollabConfig.of(inner.config):
            own_configs(model)
            setattr(model.config, name, inner.config)


def models_in(model: PreTrainedModel) -> list[tuple[str, PreTrainedModel]]:
    """Return the outermost inner models that have a config of another kind, with their paths."""
    found: list[tuple[str, PreTrainedModel]] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, PreTrainedModel) and not inside and not is_alike(module.config, model.config):
            found.append((path, module))
    return found


def config_of(model: PreTrainedModel, path: str, inner: PreTrainedModel) -> str:
    """Return the name under which the config of a model holds the config of an inner model.

    Raises:
        UnsupportedModelError: if no inner config can be identified as that of the inner model.
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
    """Return True if two configs have the same class and model type."""
    return type(config) is type(other) and config.model_type == other.model_type
