"""Keep other models in memory as they are that share parts with a trimmed one, or refuse the model."""

import copy
import gc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from collab_heads.errors import ModelStateError
from collab_heads.sites.record import own_configs
from collab_heads.vocabulary.token_tables import TokenTable


def check_other_models(model: PreTrainedModel, tables: Sequence[TokenTable]) -> None:
    """Raise ModelStateError if another model has the model in it, or a module with tables that it would lose rows of.

    Tables alone may be shared: `own_tables` copies them.
    """
    if not other_holders(model, tables):
        return
    gc.collect()  # models that nothing refers to any more, but themselves
    for part, holder in other_holders(model, tables).items():
        if part is model:
            raise ModelStateError(
                f"this {type(model).__name__} is part of a {type(holder).__name__}, whose config and other layers stay "
                "as they are: trim the whole model, or a copy of the part (copy.deepcopy)"
            )
        path = next(path for path, module in model.named_modules() if module is part)
        raise ModelStateError(
            f"{path} of this {type(model).__name__} is in a {type(holder).__name__} of another model, too, which would "
            "lose tokens that its tokenizer and config have: give one a copy of its own (copy.deepcopy) first"
        )


def other_holders(model: PreTrainedModel, tables: Sequence[TokenTable]) -> dict[nn.Module, nn.Module]:
    """Return what changes in a model, and is in a module of another one; a wrapper of the whole model is none."""
    held = holders(model, {model, *changing(model, tables)})
    return {part: each for part, each in held.items() if part is not model or isinstance(each, PreTrainedModel)}


def changing(model: PreTrainedModel, tables: Sequence[TokenTable]) -> set[nn.Module]:
    """Return the modules in a model that change with its tables: around them, with their biases, with a padding.

    The tables themselves are not among them, unless accelerate gave them a `forward`, which no copy can have.
    """
    own = {table.module for table in tables}
    owners = own | {owner for table in tables for owner, _ in table.biases}
    found = {module for module in model.modules() if not owners.isdisjoint(module.modules())}
    found |= {m for m in model.modules() if not isinstance(m, nn.Embedding) and hasattr(m, "padding_idx")}
    return {module for module in found - {model} if module not in own or "forward" in vars(module)}


def holders(model: PreTrainedModel, parts: Collection[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Return for parts of a model a module outside it that they are in; those that are in none are left out."""
    inside, wanted = {id(module) for module in model.modules()}, {id(part) for part in parts}
    found: dict[nn.Module, nn.Module] = {}
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module) and id(each) not in inside:  # isinstance would run code of lazy objects
            found |= {child: each for child in vars(each).get("_modules", {}).values() if id(child) in wanted}
    return found


def own_tables(model: PreTrainedModel, tables: Sequence[TokenTable]) -> list[TokenTable]:
    """Replace the tables that other models have, too, by copies; return the tables of the model."""
    copies = {module: own_copy(module) for module in holders(model, {table.module for table in tables})}
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child in copies:
                setattr(module, name, copies[child])
    return [of_copies(table, copies) for table in tables]


def own_copy(module: nn.Module) -> nn.Module:
    """Return another module with the same parameters, hooks and settings."""
    made = copy.copy(module)
    vars(made).update({name: each.copy() for name, each in vars(module).items() if isinstance(each, dict | set)})
    return made


def of_copies(table: TokenTable, copies: Mapping[nn.Module, nn.Module]) -> TokenTable:
    """Return a table whose modules are the copies where there are some."""
    biases = [(copies.get(owner, owner), name) for owner, name in table.biases]
    return replace(table, module=cast(Any, copies.get(table.module, table.module)), biases=biases)


def own_ids(model: PreTrainedModel) -> None:
    """Give a model copies of its configs and of those of its generation, which other models may have, too."""
    own_configs(model)
    copies: dict[int, object] = {}
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and getattr(part, "generation_config", None) is not None:
            part.generation_config = copy.deepcopy(part.generation_config, copies)
