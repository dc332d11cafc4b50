"""Align the words of a sentence to sub-word tokens, for tokenizers with and without offsets."""

import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from collab_heads.analysis.treebank.conllu import Sentence, Span

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
        """The number of units, U."""
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
    """Normalize text for comparison: decomposed, without case, accents and spaces."""
    decomposed = unicodedata.normalize("NFKD", text).casefold()
    return "".join(char for char in decomposed if unicodedata.category(char) not in DROPPED)
