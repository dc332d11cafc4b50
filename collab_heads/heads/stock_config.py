"""Change entries of the configs of a model, and make the stock model that they describe."""

import copy
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from transformers import PretrainedConfig, PreTrainedModel

from collab_heads.model.record_sync import is_alike
from collab_heads.sites.record import FIELD, own_configs

# Pairs of a config, of a model or of one of its stacks, and the new entries of all configs that are like it.
Changes: TypeAlias = Sequence[tuple[PretrainedConfig, Mapping[str, int]]]


def stock_twin(model: PreTrainedModel, changes: Changes) -> PreTrainedModel:
    """Return a model of the same config with other entries and without our record, on the meta device."""
    config = copy.deepcopy(model.config)
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PretrainedConfig))):
        update(part, changes)
        if hasattr(part, FIELD):
            delattr(part, FIELD)
    with torch.device("meta"):
        return type(model)(config)


def write_entries(model: PreTrainedModel, changes: Changes) -> None:
    """Update the configs of a model and of its stacks, in place; models that shared them keep the old ones."""
    if any(entries for _, entries in changes):
        own_configs(model)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            update(module.config, changes)


def update(config: PretrainedConfig, changes: Changes) -> None:
    """Update a config, in place, with the entries that are for it."""
    for other, entries in changes:
        if is_alike(config, other):
            config.update(dict(entries))
