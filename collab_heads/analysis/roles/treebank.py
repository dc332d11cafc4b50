"""A treebank as batches, with its words aligned with tokens."""

import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from collab_heads.base.checks import is_count
from collab_heads.errors import ArgumentError, DataError
from collab_heads.files.conllu import Sentence, Span, read_conllu
from collab_heads.running.batches import check_vocabulary, longest_input
from collab_heads.saving.vocabularies import check_words

NOTHING = -1  # the unit of a token that is part of no word
DROPPED = ("Mn", "Cc", "Cf", "Zs", "Zl", "Zp")  # accents, control characters, spaces: tokenizers differ in them


@dataclass(frozen=True)
class Aligned:
    """The tokens of a sentence and the alignment of its words to them.

    A unit is a word, or several words that no token separates ("du" for "de le", "cannot" as one token). Units are
    numbered from 0 in the order of the sentence. Every unit has a token, and every token belongs to at most one unit.

    Attributes:
        ids: the ids of the tokens, special ones included.
        token_units: the unit of every token; -1 for tokens that belong to no word, such as special tokens.
        word_units: the unit of every word.
    """

    ids: tuple[int, ...]
    token_units: tuple[int, ...]
    word_units: tuple[int, ...]

    @property
    def num_units(self) -> int:
        return len(set(self.word_units))


def align(sentence: Sentence, tokenizer: PreTrainedTokenizerBase) -> Aligned | None:
    """Tokenize the text of a sentence and find the tokens of its words.

    A token belongs to the word that holds most of its characters, and to the first such word on a tie. A word without a
    token of its own forms one unit with the word whose token covers it.

    Args:
        sentence: a sentence of `read_conllu`.
        tokenizer: any tokenizer of transformers. Fast ones give offsets. For the others the characters of the pieces
            are matched to those of the text, whatever the tokenizer does to case, accents and compatibility characters.

    Returns:
        The alignment. None if no token covers a word, or if the pieces cannot be matched to the text (an unknown piece
        does not say which characters it stands for).
    """
    encoded = with_offsets(sentence.text, tokenizer) if tokenizer.is_fast else with_pieces(sentence.text, tokenizer)
    if encoded is None:
        return None
    ids, spans = encoded
    letters: dict[int, int] = {}  # position in the text -> the first word that it is part of
    for word, (start, end) in enumerate(sentence.spans):
        for position in range(start, end):
            letters.setdefault(position, word)
    owners = [owner(letters, span) for span in spans]
    all_leaders = [leader(word, span, owners, spans) for word, span in enumerate(sentence.spans)]
    leaders = [word for word in all_leaders if word is not None]
    if len(leaders) < len(all_leaders):
        return None
    units = {word: unit for unit, word in enumerate(sorted(set(leaders)))}
    token_units = tuple(NOTHING if word is None else units[word] for word in owners)
    return Aligned(tuple(ids), token_units, tuple(units[word] for word in leaders))


def owner(letters: dict[int, int], span: Span) -> int | None:
    """Return the word that holds most characters of a token, or None if no word holds any."""
    words = Counter(letters[position] for position in range(*span) if position in letters)
    return words.most_common(1)[0][0] if words else None  # ties: the first that was met


def leader(word: int, span: Span, owners: Sequence[int | None], spans: Sequence[Span]) -> int | None:
    """Return the word if it owns a token, else the first owner of a token that overlaps it, else None."""
    if word in owners:
        return word
    over = (who for who, (start, end) in zip(owners, spans, strict=True) if start < span[1] and span[0] < end)
    return next((who for who in over if who is not None), None)


def with_offsets(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[Sequence[int], Sequence[Span]]:
    """Tokenize with a fast tokenizer; return the ids and their spans, which are empty for special tokens."""
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    return encoded["input_ids"], encoded["offset_mapping"]


def with_pieces(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[Sequence[int], Sequence[Span]] | None:
    """Return the same for a tokenizer without offsets, from the characters of its pieces; None if they do not match."""
    pieces = tokenizer.tokenize(text)
    ids, inner = (
        list(tokenizer(text, verbose=False)["input_ids"]),
        [tokenizer.convert_tokens_to_ids(piece) for piece in pieces],
    )
    before = next((i for i in range(len(ids) - len(inner) + 1) if ids[i : i + len(inner)] == inner), None)
    spans = piece_spans(text, pieces)
    if before is None or spans is None:
        return None
    after = len(ids) - len(inner) - before
    return ids, [(0, 0)] * before + spans + [(0, 0)] * after


def piece_spans(text: str, pieces: Sequence[str]) -> list[Span] | None:
    """Return the spans of consecutive pieces in a text, or None unless they make up all of it.

    A piece without characters of its own, such as SentencePiece's lone "▁", gets the span of the following character.
    """
    letters = [(letter, position) for position, char in enumerate(text) for letter in fold(char)]
    folded, spans, at = "".join(letter for letter, _ in letters), [], 0
    if not folded:
        return None
    for piece in pieces:
        form = next((form for form in bare_forms(piece) if folded.startswith(form, at)), None)
        if form is None:
            return None
        following = min(at, len(letters) - 1)
        first, last = (at, at + len(form) - 1) if form else (following, following)
        spans.append((letters[first][1], letters[last][1] + 1))
        at += len(form)
    return spans if at == len(letters) else None


def bare_forms(piece: str) -> Iterator[str]:
    """Yield the texts that a piece may stand for, without the marks of the three kinds of tokenizers."""
    yield fold(piece.replace("\u2581", ""))  # SentencePiece
    yield fold(piece.removeprefix("##"))  # WordPiece
    yield fold(piece.removesuffix("@@").removesuffix("</w>"))  # byte-pair encodings


def fold(text: str) -> str:
    decomposed = unicodedata.normalize("NFKD", text).casefold()
    return "".join(char for char in decomposed if unicodedata.category(char) not in DROPPED)


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
