"""Which sentences of a data set are typical by their length."""

import math
from collections.abc import Iterable, Mapping

from transformers import PreTrainedModel

from collab_heads.analysis.measures.sentences import rows
from collab_heads.model.masks import token_masks

Place = tuple[int, int]  # number of a batch, row in it


def typical_sentences(model: PreTrainedModel, batches: Iterable[Mapping], number: int) -> list[Place]:
    """Choose sentences of typical lengths: the median for one, the quartiles for three, and so on.

    The model does not run. Of encoder-decoders, the lengths are those of the source.

    Args:
        model: whose inputs they are.
        batches: input dicts as the model takes them, read once.
        number: how many; all if there are no more.

    Returns:
        Where the sentences are, the shortest first.
    """
    places: list[tuple[int, Place]] = []
    for index, inputs in enumerate(batches) if number else ():
        mask = next((mask for mask in token_masks(model, inputs).values() if mask is not None), None)
        lengths = [0] * rows(inputs) if mask is None else mask.sum(1).tolist()  # without padding all are of one length
        places += [(length, (index, row)) for row, length in enumerate(lengths)]
    places.sort()
    if len(places) > number:
        places = [places[math.ceil(len(places) * part / (number + 1)) - 1] for part in range(1, number + 1)]
    return [place for _, place in places]
