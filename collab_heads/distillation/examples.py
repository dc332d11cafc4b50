"""List and check the batches of a distillation, also in two vocabularies, and hold out a part of them.

Across two vocabularies each model reads an example in its own tokens, and means over tokens are compared.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.errors import ArgumentError, CalibrationError, CollabHeadsError, UnsupportedModelError
from collab_heads.files.checkpoint import NOT_COMPUTED
from collab_heads.model.opened import check_trainable
from collab_heads.model.refusals import check_wrapper
from collab_heads.running.batches import (
    Batch,
    Part,
    each_batch,
    has_text_labels,
    naming_batch,
    num_rows,
    select,
    token_masks,
    without_unread_labels,
)
from collab_heads.running.portions import IGNORED, without_padding
from collab_heads.sites.record import FIELD, GRIDS, TRIMMED

HELD_OUT = 8  # one batch of so many is held out
MOST_HELD_OUT = 16  # batches: more cost time at every evaluation and add little
FEW_HELD_OUT, EACH = 4, 32  # of short trainings as many, or one for so many steps if that is more


def list_batches(model: PreTrainedModel, batches: Iterable[Mapping]) -> list[Batch]:
    """List batches, and drop labels that no decoder reads."""
    listed: list[Batch] = []
    try:
        for batch in each_batch(batches):
            listed.append(without_unread_labels(model, batch))
    except CollabHeadsError:
        raise
    except Exception as error:  # whatever a data loader raises
        raise CalibrationError(f"batch {len(listed)} cannot be read: {type(error).__name__}: {error}") from error
    for index, batch in enumerate(listed):
        check_tokens(model, index, batch)
    return listed


def check_tokens(model: PreTrainedModel, index: int, batch: Batch) -> None:
    """Raise CalibrationError if the model cannot take a batch, or the batch has no rows or no tokens that count."""
    tensors = [value for value in batch.values() if isinstance(value, Tensor)]
    if not tensors:
        raise CalibrationError(f"batch {index} holds no tensors but {sorted(batch)}: pass return_tensors='pt'")
    with naming_batch(model, index, batch):
        masks = token_masks(model, batch)
    nothing = any(mask is not None and not mask.any() for mask in masks.values())
    if has_text_labels(batch):
        nothing |= not bool((batch["labels"] != IGNORED).any())
    if nothing or any(not tensor.numel() for tensor in tensors):
        raise CalibrationError(f"batch {index} holds no tokens: leave it out")


def num_examples(steps: int, size: int) -> int:
    """Return how many examples a distillation can use: a batch of `size` for every step, plus those held out."""
    return size * max(steps + math.ceil(steps / (HELD_OUT - 1)), HELD_OUT)


def split(batches: Sequence[Batch], steps: int) -> tuple[Part, Part]:
    """Divide batches into those to train on and those that are held out, with their numbers.

    Of eight batches or more, every eighth is held out, at most about 16 in total, and about 4 for a training of up to
    128 steps, so that evaluations take about a tenth of its time. Of fewer batches, an eighth of the rows of each is
    held out, at least one row. If no batch can be divided, the last one is held out; if there is only one, it is in
    both.
    """
    every_one = list(enumerate(batches))
    if len(batches) >= HELD_OUT:
        every = max(HELD_OUT, len(batches) // min(MOST_HELD_OUT, max(FEW_HELD_OUT, steps // EACH)))
        return [each for each in every_one if (each[0] + 1) % every], every_one[every - 1 :: every]
    parts = [(number, *split_rows(batch)) for number, batch in every_one]
    held_out = [(number, held) for number, _, held in parts if held is not None]
    if held_out:
        return [(number, train) for number, train, _ in parts], held_out
    return every_one[:-1] or every_one, every_one[-1:]


def split_rows(batch: Batch) -> tuple[Batch, Batch | None]:
    """Divide the rows of a batch into those to train on and those held out; None if it cannot be divided."""
    rows = num_rows(batch)
    if rows is None or rows < 2:
        return batch, None
    count = rows - max(1, rows // HELD_OUT)
    return select(batch, slice(count)), select(batch, slice(count, rows))


def in_order(count: int, seed: int, steps: int) -> list[int]:
    """Return the index, below `count`, of the batch of each step; every epoch has its own order."""
    places: list[int] = []
    generator = torch.Generator().manual_seed(seed)
    while len(places) < steps:
        places += torch.randperm(count, generator=generator).tolist()
    return places[:steps]


MAY_DIFFER = {FIELD, GRIDS, *NOT_COMPUTED}  # entries of two configs


def check_pair(
    model: PreTrainedModel, original: PreTrainedModel, may_differ: Callable[[str], bool] | None = None
) -> None:
    """Raise an error unless both are plain models of one class and the same sizes.

    Args:
        model: the changed model.
        original: its original.
        may_differ: says which entries of the configs may differ; None for those alone that say how a model was made.
    """
    check_wrapper(model)
    check_wrapper(original)
    check_trainable(model, "a distillation")
    if model is original:
        raise ArgumentError("model and original are one object: load the original again, or copy.deepcopy it before")
    if type(model) is not type(original):
        names = f"{type(model).__name__} and the original a {type(original).__name__}"
        raise ArgumentError(f"the model is a {names}: load both with the same class")
    ours, theirs = flat(model.config.to_dict()), flat(original.config.to_dict())
    differing = [name for name in sorted(ours.keys() | theirs) if ours.get(name) != theirs.get(name)]
    if may_differ is not None:
        differing = [name for name in differing if not may_differ(name)]
    elif TRIMMED in differing:
        raise ArgumentError(
            "the vocabularies of model and original differ: pass original_batches, the same examples in the tokens of "
            "the original, or trim the original with the same texts, too"
        )
    if differing:
        pairs = ", ".join(f"{name} {ours.get(name)!r:.60} and {theirs.get(name)!r:.60}" for name in differing[:5])
        raise ArgumentError(f"the configs of model and original differ: {pairs}: only attention may be changed")


def flat(config: Mapping, prefix: str = "") -> dict[str, object]:
    """Return the entries of a config except `MAY_DIFFER`, those of inner configs under dotted names."""
    found: dict[str, object] = {}
    for name, value in config.items():
        if name in MAY_DIFFER:
            continue
        if isinstance(value, Mapping) and name.endswith("config"):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def check_apart(trained: Mapping[str, nn.Parameter], original: PreTrainedModel) -> None:
    """Raise ArgumentError if the original shares a trained tensor, so that training would change it."""
    theirs = {parameter.data_ptr() for parameter in original.parameters()}
    for name, parameter in trained.items():
        if parameter.numel() and parameter.data_ptr() in theirs:
            raise ArgumentError(f"model and original share {name}: load the original again, or copy.deepcopy it")


ORIGINAL = "original:"  # begins the names of what the original reads, in batches of both
# entries of a config that say how many tokens there are, and which ones have a purpose
OF_VOCABULARY = re.compile(
    r"(^|[._])(vocab_size|token_ids?|token_index|to_id|suppress_tokens|bad_words_ids|force_words_ids|sequence_bias)$"
)


def says_of_vocabulary(entry: str) -> bool:
    """Return True if an entry of a config belongs to the vocabulary, so that it changes when tokens are removed."""
    return entry.startswith(TRIMMED) or OF_VOCABULARY.search(entry) is not None


def joined(
    model: PreTrainedModel, original: PreTrainedModel, batches: list[Batch], original_batches: Iterable[Mapping]
) -> list[Batch]:
    """Return batches that hold what the model reads and, under marked names, what the original reads."""
    if original.can_generate():
        raise UnsupportedModelError(
            f"{type(original).__name__} writes tokens, which cannot be compared across two vocabularies: trim the "
            "original with the same texts, too, and leave original_batches out"
        )
    theirs = list_batches(original, original_batches)
    if len(theirs) != len(batches):
        raise CalibrationError(
            f"there are {len(batches)} batches and {len(theirs)} original_batches: both must hold the same examples, "
            "in the same order"
        )
    for index, (ours, other) in enumerate(zip(batches, theirs, strict=True)):
        rows = num_rows(ours), num_rows(other)
        if None in rows or rows[0] != rows[1]:
            raise CalibrationError(
                f"batch {index} holds {rows[0]} examples for the model and {rows[1]} for the original: both must hold "
                "the same examples, in the same order, and one row for each"
            )
        if marked := [name for name in ours if name.startswith(ORIGINAL)]:
            raise ArgumentError(f"batch {index} has an input {marked[0]!r}: names must not begin with {ORIGINAL!r}")
    return [
        ours | {ORIGINAL + name: value for name, value in other.items()}
        for ours, other in zip(batches, theirs, strict=True)
    ]


def are_joined(batch: Mapping) -> bool:
    """Return True if a batch holds the inputs of two vocabularies."""
    return any(name.startswith(ORIGINAL) for name in batch)


def inputs_of(batch: Batch, original: bool) -> Batch:
    """Return what one of the models reads of a batch of both, without unneeded padding; any other batch is returned."""
    if not are_joined(batch):
        return batch
    named = {name.removeprefix(ORIGINAL): name for name in batch if name.startswith(ORIGINAL) == original}
    return without_padding({name: batch[place] for name, place in named.items()}, is_encoder_decoder=False)


def embeddings(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the tables of token embeddings, by name: pieces now stand for words that they did not stand for."""
    tables = set[int]()
    for part in (part for part in model.modules() if isinstance(part, PreTrainedModel)):
        try:
            table = part.get_input_embeddings()
        except (AttributeError, NotImplementedError):  # a model of several stacks may have none of its own
            continue
        if isinstance(table, nn.Embedding):  # not the patches of images
            tables.add(id(table.weight))
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in tables}
