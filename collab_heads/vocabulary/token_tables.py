"""The rows of a model that belong to tokens: found, counted, and kept for some tokens."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.errors import ArgumentError, UnsupportedModelError
from collab_heads.saving.vocabularies import SPARE, size
from collab_heads.sites.record import own_configs
from collab_heads.vocabulary.needed_ids import ONE_ID, configs_of, is_id, renumber

COUNTS_POSITIONS = "create_position_ids_from_inputs_embeds"  # a method of embeddings whose positions begin behind it
SIZES = ("vocab_size", "decoder_vocab_size")


@dataclass(frozen=True)
class TokenTable:
    """An embedding or an output layer, with the vectors that are added to its logits.

    Attributes:
        module: its `weight` has a row a token: [V, D].
        biases: modules with the name of a parameter or buffer, [V] or [1, V], of this table.
        side: which of the vocabularies it is for.
    """

    module: nn.Embedding | nn.Linear
    biases: Sequence[tuple[nn.Module, str]]
    side: int


def token_tables(model: PreTrainedModel, sides: int) -> list[TokenTable]:
    """Return the tables of a model, each once.

    Args:
        model: the model.
        sides: 2 if encoder and decoder have vocabularies of their own.

    Raises:
        UnsupportedModelError: if the model has none, others that are not known here, or one that is quantised, or not
            in memory.
    """
    decoding = set[nn.Module]()
    if sides == 2:
        decoding = {*cast(Any, model).get_decoder().modules(), cast(nn.Module, model.get_output_embeddings())}
    found: dict[nn.Module, TokenTable] = {}
    for part in (part for part in model.modules() if isinstance(part, PreTrainedModel)):
        for module in (input_table(part), part.get_output_embeddings()):
            if not isinstance(module, nn.Embedding | nn.Linear) or module in found:
                continue
            found[module] = TokenTable(module, biases_of(model, part, module), int(module in decoding))
    weights = {id(module.weight): table.side for module, table in found.items()}
    for module in model.modules():  # some have their table under another name, too
        if isinstance(module, nn.Embedding) and module not in found and id(module.weight) in weights:
            found[module] = TokenTable(module, (), weights[id(module.weight)])
    if not any(isinstance(module, nn.Embedding) for module in found):
        raise UnsupportedModelError(f"{type(model).__name__} reads no tokens: there is no vocabulary to trim")
    check_other_tables(model, found)
    for table in found.values():
        if not table.module.weight.is_floating_point() or table.module.weight.device.type == "meta":
            raise UnsupportedModelError(
                f"the embeddings of {type(model).__name__} are quantised or not in memory: load the model whole, trim "
                "it, then quantise it"
            )
    return list(found.values())


def check_other_tables(model: PreTrainedModel, tables: Collection[nn.Module]) -> None:
    """Raise UnsupportedModelError if another module has a row, or a column, for every token.

    Some decoders read ids a second time, in all layers, and some compute logits with a second matrix. A number that the
    config has for positions, too, does not tell, nor one that is also a width, of columns.
    """
    fields = [(name, value) for config in configs_of(model) for name, value in vars(config).items() if is_id(value)]
    sizes = {cast(Tensor, module.weight).shape[0] for module in tables}
    sizes |= {value for name, value in fields if name.startswith("vocab_size")}
    rows = sizes - {value for name, value in fields if "position" in name}
    columns = sizes - {value for name, value in fields if "vocab_size" not in name}
    for path, module in model.named_modules():
        is_row = isinstance(module, nn.Embedding) and module.num_embeddings in rows
        is_column = isinstance(module, nn.Linear) and module.in_features in columns
        if module not in tables and (is_row or is_column):
            raise UnsupportedModelError(
                f"{type(model).__name__} has another table of tokens, {path}: its vocabulary cannot be trimmed"
            )


def input_table(part: PreTrainedModel) -> nn.Module | None:
    """Return what embeds the input of a model; None if it says nothing."""
    try:
        return part.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def biases_of(model: PreTrainedModel, part: PreTrainedModel, module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the biases of an output layer: its own, that of the module around it, and that of the logits."""
    if not isinstance(module, nn.Linear) and module is not part.get_output_embeddings():
        return []
    rows = module.weight.shape[0]
    around = [outer for outer in model.modules() if module in outer.children()]
    found = []
    for owner in (module, *around, part):
        for name, tensor in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)):
            if name.endswith("bias") and tensor.shape in ((rows,), (1, rows)) and (owner, name) not in found:
                found.append((owner, name))
    return found


def check_rows(tables: Sequence[TokenTable], vocabularies: Sequence[Mapping[str, int]]) -> None:
    for side in range(len(vocabularies)):
        embeddings = [each.module for each in tables if each.side == side and isinstance(each.module, nn.Embedding)]
        if len(found := {each.num_embeddings for each in embeddings}) > 1:
            raise UnsupportedModelError(
                f"the embeddings of the model have rows for {' and '.join(f'{each:,}' for each in sorted(found))} "
                "tokens: its encoder and its decoder read tokens of their own, and one tokenizer cannot tell which stay"
            )
    for table in sorted(tables, key=lambda table: isinstance(table.module, nn.Linear)):
        rows, needed = table.module.weight.shape[0], size(vocabularies[table.side])
        if isinstance(table.module, nn.Linear) and not needed <= rows <= needed + SPARE:  # the embeddings are right
            raise UnsupportedModelError(
                f"what the model calls its output layer has {rows:,} rows, and its embeddings have one for each of the "
                f"{needed:,} tokens: its vocabulary cannot be trimmed"
            )
        if rows < needed <= rows + SPARE:
            raise ArgumentError(
                f"the tokenizer has {needed:,} tokens, and the model has rows for {rows:,}: if tokens were added to "
                f"its own tokenizer, call model.resize_token_embeddings({needed}) first, else pass the tokenizer that "
                "the model was trained with"
            )
        if rows > needed + SPARE:
            raise ArgumentError(
                f"the tokenizer has {needed:,} tokens, and the model has rows for {rows:,}: if the others are spare, "
                f"call model.resize_token_embeddings({needed}) first, else pass the tokenizer that the model was "
                "trained with"
            )
        if rows < needed:
            raise ArgumentError(
                f"the tokenizer has {needed:,} tokens, and the model has rows for {rows:,}: pass the tokenizer that "
                "the model was trained with"
            )


def count_parameters(tables: Sequence[TokenTable]) -> int:
    tensors = (tensor for table in tables for tensor in tensors_of(table))
    return sum({id(each): each.numel() for each in tensors if isinstance(each, nn.Parameter)}.values())


def tensors_of(table: TokenTable) -> Iterator[Tensor]:
    """Yield all that has an entry for a token."""
    yield table.module.weight
    for owner, name in table.biases:
        yield getattr(owner, name)


def own_parts(model: PreTrainedModel, tables: Sequence[TokenTable]) -> list[TokenTable]:
    """Give a model configs and tables of its own, since other models may have the same ones, and return its tables.

    Parameters are not copied. The modules around the tables stay, for whoever holds `model.get_encoder()`.
    """
    copies: dict[nn.Module | None, nn.Module] = {table.module: own_copy(table.module) for table in tables}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            module._modules[name] = copies.get(child, child)
    own_configs(model)
    generations: dict[int, Any] = {}
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and getattr(part, "generation_config", None) is not None:
            part.generation_config = copy.deepcopy(part.generation_config, generations)
    return [
        replace(
            table,
            module=cast(Any, copies[table.module]),
            biases=[(copies.get(owner, owner), name) for owner, name in table.biases],
        )
        for table in tables
    ]


def own_copy(module: nn.Module) -> nn.Module:
    """Return another module with the same parameters, hooks and settings."""
    made = copy.copy(module)
    for name, value in list(vars(made).items()):
        if isinstance(value, dict | set):
            value = value.copy()
        elif isinstance(value, MethodType) and value.__self__ is module:  # as accelerate leaves on modules
            value = MethodType(value.__func__, made)
        elif isinstance(value, partial) and value.args[:1] == (module,):
            value = partial(value.func, made, *value.args[1:], **value.keywords)
        vars(made)[name] = value
    return made


@torch.no_grad()
def keep_rows(model: PreTrainedModel, tables: Sequence[TokenTable], kept: Sequence[Sequence[int]]) -> None:
    """Keep some rows of the tables, in place; what is tied stays tied, and the configs say the new numbers and ids.

    Args:
        model: the model.
        tables: those of `token_tables`.
        kept: for each vocabulary, the ids that stay, in order: they become 0, 1, 2...
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old tensor, whose id is that of another one once it is gone
    ids = [dict(zip(each, range(len(each)), strict=True)) for each in kept]
    before = {table.side: table.module.weight.shape[0] for table in tables}

    def smaller(tensor: Tensor, side: int) -> Tensor:
        if id(tensor) not in made:
            rows = torch.tensor(kept[side], device=tensor.device)
            chosen = tensor.detach().index_select(-1 if tensor.shape[0] == 1 else 0, rows).clone()
            if isinstance(tensor, nn.Parameter):
                chosen = nn.Parameter(chosen, tensor.requires_grad)
            made[id(tensor)] = tensor, chosen
        return made[id(tensor)][1]

    for table in tables:
        for owner, name in (*table.biases, (table.module, "weight")):
            setattr(owner, name, smaller(getattr(owner, name), table.side))
        if isinstance(table.module, nn.Embedding):
            table.module.num_embeddings = len(kept[table.side])
            if table.module.padding_idx is not None:
                table.module.padding_idx = ids[table.side].get(table.module.padding_idx)
        else:
            table.module.out_features = len(kept[table.side])
    for part in (part for part in model.modules() if isinstance(part, PreTrainedModel)):
        if getattr(part, "vocab_size", None) == before[0]:
            part.vocab_size = len(kept[0])
    for config in configs_of(model):
        renumber(config, ids[-1])
        for name in SIZES:
            side = len(kept) - 1 if name == "decoder_vocab_size" else 0
            if getattr(config, name, None) == before.get(side):
                setattr(config, name, len(kept[side]))
    for module in model.modules():  # CLIP's stack of texts holds the id of their end
        for name, value in list(vars(module).items()):
            if ONE_ID.search(name) and is_id(value):
                setattr(module, name, ids[-1].get(value, value))
    for module in model.modules():
        padding = getattr(module, "padding_idx", None)
        if not isinstance(module, nn.Embedding) and isinstance(padding, int):
            module.padding_idx = cast(Any, ids[-1].get(padding, padding))


def check_positions(model: PreTrainedModel, ids: Mapping[int, int]) -> None:
    """Raise UnsupportedModelError if positions are counted from the id of the padding, and that would change.

    Args:
        model: the model.
        ids: old id -> new id, of the tokens that stay.
    """
    for part in model.modules():
        padding = getattr(part, "padding_idx", None)  # MPNet counts from 1, whatever its config says
        if hasattr(part, COUNTS_POSITIONS) and padding is not None and (new := ids.get(padding)) != padding:
            raise UnsupportedModelError(
                f"{type(model).__name__} counts positions from the id of its padding, {padding}, which would become "
                f"{new}: its padding must be among the first tokens"
            )
