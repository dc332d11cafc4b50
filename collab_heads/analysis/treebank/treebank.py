"""Batches of sentences with gold dependencies, as a model takes them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from collab_heads.analysis.treebank.alignment import Aligned, align
from collab_heads.analysis.treebank.conllu import Sentence, read_conllu
from collab_heads.base.checks import is_count
from collab_heads.errors import ArgumentError, DataError
from collab_heads.model.vocabularies import check_words

logger = logging.get_logger("transformers.collab_heads")


class Treebank:
    """The sentences of a treebank that a model can read, as batches of tokens padded on the right.

    Sentences of similar length share a batch. Encoder-decoders get one decoder token so that they run; only their
    encoder is measured. Sentences that are too long for the model and sentences whose words cannot be aligned to tokens
    are skipped, counted and reported in a warning.

    Args:
        source: a CoNLL-U file, or the sentences that `read_conllu` returned.
        tokenizer: the model's tokenizer.
        model: the model.
        batch_size: number of sentences per batch.

    Attributes:
        sentences: the sentences to measure with their alignments, sorted by length; iteration yields their batches in
            this order.
        limit: the largest number of tokens that the model takes, or None.
        skipped: reason ("too long" or "not aligned") -> number of sentences.

    Raises:
        ArgumentError: on a batch size below 1, an object that is not a tokenizer, or a tokenizer with ids that the
            model lacks.
        DataError: if the file is missing or broken, or no sentence remains.
    """

    def __init__(
        self,
        source: str | Path | Sequence[Sentence],
        tokenizer: PreTrainedTokenizerBase,
        model: PreTrainedModel,
        *,
        batch_size: int = 32,
    ):
        if not is_count(batch_size):
            raise ArgumentError(f"batch_size={batch_size!r}: expected 1 or more")
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ArgumentError(f"tokenizer: expected the model's tokenizer, not {type(tokenizer).__name__}")
        check_words(tokenizer)
        self.batch_size, self.limit = batch_size, longest_input(model, tokenizer)
        named = str(source) if isinstance(source, str | Path) else "the treebank"
        sentences = read_conllu(source) if isinstance(source, str | Path) else list(source)
        self.sentences, self.skipped = self.fitting([(each, align(each, tokenizer)) for each in sentences])
        self.padding = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.has_decoder = model.config.is_encoder_decoder
        self.report(named, len(sentences))
        check_vocabulary(model, tokenizer, max(max(aligned.ids) for _, aligned in self.sentences))

    def fitting(
        self, pairs: Sequence[tuple[Sentence, Aligned | None]]
    ) -> tuple[list[tuple[Sentence, Aligned]], dict[str, int]]:
        """Return the sentences that can be measured, sorted by length, and the number of the others by reason."""
        with_words = [(sentence, aligned) for sentence, aligned in pairs if aligned is not None]
        short = [pair for pair in with_words if self.limit is None or len(pair[1].ids) <= self.limit]
        skipped = {"too long": len(with_words) - len(short), "not aligned": len(pairs) - len(with_words)}
        return sorted(short, key=lambda pair: len(pair[1].ids)), skipped

    def report(self, named: str, total: int) -> None:
        """Warn about skipped sentences, or raise DataError if none remains."""
        long, lost = self.skipped.values()
        left_out = f"{long} longer than the {self.limit} tokens that the model takes, {lost} not aligned to its tokens"
        if not self.sentences:
            raise DataError(f"{named}: none of {total} sentences can be measured: {left_out}")
        if long or lost:
            logger.warning(f"{named}: {long + lost} of {total} sentences are skipped: {left_out}")

    def __len__(self) -> int:
        return -(-len(self.sentences) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.inputs(index) for index in range(len(self)))

    def batch(self, index: int) -> list[tuple[Sentence, Aligned]]:
        """Return the sentences of a batch, in the order of its rows."""
        return self.sentences[index * self.batch_size : (index + 1) * self.batch_size]

    def inputs(self, index: int) -> dict[str, Tensor]:
        """Return a batch as model inputs: ids and mask, both [B, T], and [B, 1] for a decoder."""
        rows = [torch.tensor(aligned.ids) for _, aligned in self.batch(index)]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.padding)
        lengths = torch.tensor([len(row) for row in rows])
        inputs = {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}
        if self.has_decoder:
            # whatever the decoder reads, the encoder sees nothing of it
            inputs["decoder_input_ids"] = ids.new_zeros(len(rows), 1)
        return inputs


def longest_input(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the number of tokens that a model takes, special ones included, or None without a limit."""
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < 1e9 else []  # a huge number means: unknown
    if (positions := getattr(model.config, "max_position_embeddings", None)) is not None:
        words = model.get_input_embeddings()
        tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not words]
        # positions that start after a padding index (RoBERTa) leave fewer than the table has
        unused = [t.padding_idx + 1 for t in tables if t.num_embeddings == positions and t.padding_idx is not None]
        limits.append(positions - max(unused, default=0))
    return min(limits, default=None)


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, highest: int) -> None:
    """Raise ArgumentError if the tokenizer gives ids that the model does not have."""
    known = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    if highest >= known:
        raise ArgumentError(
            f"the {type(tokenizer).__name__} gives the id {highest}, but the {type(model).__name__} has {known} "
            "embeddings: pass the tokenizer of this model"
        )
