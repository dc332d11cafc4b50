"""Distil across two vocabularies: each model reads an example in its own tokens, and means over tokens are compared."""

import re
from collections.abc import Iterable, Mapping

from torch import nn
from transformers import PreTrainedModel

from collab_heads.distillation.examples import list_batches
from collab_heads.errors import ArgumentError, CalibrationError, UnsupportedModelError
from collab_heads.model.batches import Batch, num_rows
from collab_heads.model.portions import without_padding
from collab_heads.sites.record import TRIMMED

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
    """Return batches that hold what the model reads and, under marked names, what the original reads.

    Raises:
        UnsupportedModelError: if the models write tokens, which cannot be compared.
        CalibrationError: if the numbers of batches or of examples differ, or a batch cannot be divided by examples.
        ArgumentError: if a batch has inputs whose names are marked already.
    """
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
