"""Batches that several passes read."""

import operator
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from collab_heads.checks import check_count
from collab_heads.errors import ArgumentError
from collab_heads.model.batches import each_batch


class Sentences:
    """Batches that can be read again and again; the sentences of a whole reading are counted.

    Args:
        batches: input dicts, in a list or anything else that starts anew when it is iterated over again.

    Attributes:
        count: sentences of the last whole reading; 0 before.

    Raises:
        ArgumentError: on an iterator, which can be read only once.
    """

    def __init__(self, batches: Iterable[Mapping]):
        if isinstance(batches, Iterator):
            raise ArgumentError(
                f"batches is a {type(batches).__name__}, which can be read only once, and an analysis reads it several "
                "times: pass a list, or an object whose __iter__ starts anew, such as a DataLoader"
            )
        self.batches, self.count = batches, 0

    def __iter__(self) -> Iterator[Mapping]:
        count = 0
        for batch in each_batch(self.batches):
            count += rows(batch)
            yield batch
        self.count = count

    def __length_hint__(self) -> int:
        return operator.length_hint(self.batches)

    def first(self, number: int) -> Iterator[Mapping]:
        """The first sentences only, in batches as they are, the last one cut; an ArgumentError below one."""
        check_count("the number of sentences", number, least=1)
        for batch in each_batch(self.batches):
            size = rows(batch)
            cut = size > number
            yield {k: v[:number] if cut and is_per_row(v, size) else v for k, v in batch.items()}
            number -= size
            if number <= 0:
                return


def rows(batch: Mapping) -> int:
    """How many sentences a batch holds."""
    return max((len(v) for v in batch.values() if isinstance(v, Tensor) and v.ndim), default=0)


def is_per_row(value: object, size: int) -> bool:
    """Whether a value of a batch has one entry per sentence."""
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == size
