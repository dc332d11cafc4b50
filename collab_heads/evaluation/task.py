"""What the tasks of `evaluate` have in common: their examples, and how models read their texts."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.base.progress import progress_bar
from collab_heads.data.batches import check_room, longest_first, with_padding
from collab_heads.errors import DataError
from collab_heads.evaluation.scores import Score
from collab_heads.model.opened import input_device
from collab_heads.running.batches import check_vocabulary, longest_input, moved
from collab_heads.running.embeddings import embed
from collab_heads.serving.comparison import ROUNDS, naming_outputs
from collab_heads.serving.in_engine import ModelInEngine
from collab_heads.serving.sentence_encoder import embedding_texts, is_sentence_encoder, sentence_encoder
from collab_heads.serving.served_model import ServedModel


class Limits(NamedTuple):
    """The settings of reading: texts at a time, the most tokens of one, and a prefix of every first text."""

    batch_size: int
    max_length: int
    source_prefix: str = ""


class Task:
    """A task with its examples.

    Args:
        columns: the texts and labels, one list for each column of the task, [N] each.
        where: the name of the data, for messages.
        limits: how texts are read.

    Attributes:
        COLUMNS: the names that the columns may have in a table, in their order; the first that are there count.
        TEXTS: which of the columns have a text in every row.
        PACKAGES: what it needs of the extra `train`.
        FLIPS: what the share of answers that differ from the original's is a share of.
        ROUNDS: how often the first examples are timed.
        SIGN: -1 where less is better, else 1.
    """

    COLUMNS: ClassVar[tuple[tuple[str, ...], ...]]
    TEXTS: ClassVar[slice] = slice(2)
    PACKAGES: ClassVar[tuple[str, ...]] = ()
    FLIPS: ClassVar[str]
    ROUNDS: ClassVar[int] = ROUNDS
    SIGN: ClassVar[int] = 1

    def __init__(self, columns: Sequence[Sequence[str]], where: str, limits: Limits):
        self.columns, self.where, self.limits = [list(column) for column in columns], where, limits
        for column in self.columns[self.TEXTS]:
            for row, text in enumerate(column, 1):
                if not text.strip():
                    raise DataError(f"{where}, example {row}: an empty text: leave the example out")

    @property
    def name(self) -> str:
        """The name of the task."""
        return type(self).__name__.lower()

    def __len__(self) -> int:
        return len(self.columns[0])

    def count(self, answers: Any) -> int:
        """Return the number of examples that are drawn: pairs, texts, queries."""
        return len(self)

    def first(self, count: int) -> "Task":
        """Return the task with its first examples alone."""
        return type(self)([column[:count] for column in self.columns], self.where, self.limits)

    def check(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise an error of ours if a model cannot do the task."""

    def answers(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Return what a model answers, for `scores` and `flips`."""
        raise NotImplementedError

    def scores(self, answers: Any) -> dict[str, Score]:
        """Return the scores of answers by their names."""
        raise NotImplementedError

    def flips(self, answers: Any, original: Any) -> float:
        """Return the share of answers that differ from the original's, from 0 to 1."""
        raise NotImplementedError

    def numbers(self, column: int) -> np.ndarray:
        """Return a column as numbers, [N]."""
        found = np.empty(len(self))
        for row, text in enumerate(self.columns[column]):
            try:
                found[row] = float(text)
            except ValueError:
                found[row] = np.nan
            if not np.isfinite(found[row]):
                raise DataError(f"{self.where}, example {row + 1}: {text!r:.40} is no number")
        return found

    def batches(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *texts: Sequence[str],
        prompt: str = "",
        most: int | None = None,
    ) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Yield batches of texts of similar length, or of pairs, with the indices of their rows.

        Args:
            model: reads them.
            tokenizer: its tokenizer.
            texts: one column, or two.
            prompt: stands before every first text where the task has no prefix.
            most: the tokens that the model wants at most, beside the other limits.
        """
        tokenizer = with_padding(tokenizer, model.config)
        if isinstance(model, ModelInEngine):
            limit = None if isinstance(model, ServedModel) else model.config.max_position_embeddings
        else:
            limit = longest_input(model, tokenizer)
        most = min(self.limits.max_length, limit or tokenizer.model_max_length, most or self.limits.max_length)
        check_room("max_length", most, tokenizer, len(texts) > 1)
        first, *others = map(list, texts)
        first = [f"{self.limits.source_prefix or prompt}{text}" for text in first]
        columns = tokenizer(first, *others, truncation=True, max_length=most)
        ids = columns["input_ids"]
        if not isinstance(model, ModelInEngine):
            check_vocabulary(model, tokenizer, max((max(row, default=0) for row in ids), default=0))
        groups = longest_first(list(map(len, ids)), self.limits.batch_size)
        for group in progress_bar(groups, desc="answering"):
            rows = {name: [values[row] for row in group] for name, values in columns.items()}
            batch = tokenizer.pad(rows, return_tensors="pt", padding_side="right")
            yield group, moved(dict(batch), input_device(model))

    def embedded(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *kinds: str
    ) -> Tensor:
        """Return the embeddings of texts, of unit length, [N, D].

        Of a sentence encoder the pooling and the layers count, and how its folder says that texts are read: with which
        prompt, how long, in lower case. Of other models states are averaged.

        Args:
            model: embeds them.
            tokenizer: its tokenizer.
            texts: the texts, N of them.
            kinds: what the texts are, such as `query`: the names of their prompt, else the default one stands there.
        """
        order: list[int] = []
        base = cast(PreTrainedModel, model.base_model)  # of a model with a head, if its config names one
        is_encoder = not isinstance(model, ModelInEngine) and is_sentence_encoder(base)
        encoder = sentence_encoder(base) if is_encoder else None
        said, reading = getattr(encoder or model, "texts", None), dict[str, Any]()
        if said is not None:
            tokenizer = copy.deepcopy(tokenizer)
            said.lower_case(tokenizer)
            reading = {"prompt": said.prompt(*kinds), "most": said.max_seq_length}

        def ordered() -> Iterator[dict[str, Tensor]]:
            for group, batch in self.batches(model, tokenizer, texts, **reading):
                order.extend(group)
                yield batch

        with naming_outputs(base), embedding_texts(base, encoder):
            rows = embed(base, ordered()).float().cpu()
        if said is not None and said.truncate_dim is not None:
            rows = torch.nn.functional.normalize(rows[:, : said.truncate_dim], dim=-1)
        return torch.empty_like(rows).index_copy_(0, torch.tensor(order), rows)
