"""The models of tokenizers: which tokens can never go, and which ones a token is built from."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from collab_heads.errors import ArgumentError

BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


class TokenModel(ABC):
    """The part of a tokenizer that divides words into tokens.

    Args:
        data: the entry `model` of a `tokenizer.json`.
    """

    type: ClassVar[str]

    def __init__(self, data: Mapping[str, Any]):
        self.data = data
        self.tokens: Collection[str] = data["vocab"]

    @abstractmethod
    def always(self) -> set[str]:
        """Return the tokens without which a text that has none unknown could get one."""

    def parts(self, token: str) -> Collection[str]:
        """Return the tokens that a token is built from, step by step."""
        return ()

    @abstractmethod
    def trimmed(self, ids: Mapping[str, int]) -> dict[str, Any]:
        """Return the entry `model` with the tokens in `ids`, token -> new id."""


class WordPiece(TokenModel):
    """The longest token that fits, from left to right."""

    type = "WordPiece"

    def always(self):
        inside = self.data["continuing_subword_prefix"]
        found = set()
        for token in self.tokens:
            text = token.removeprefix(inside)
            begins = token[:1] if text == token else inside + text[:1]
            needed = {begins, *(inside + character for character in text[1:])}
            # a character that is not a token by itself needs all tokens that it is in
            if len(text) == 1 or not all(each in self.tokens for each in needed):
                found.add(token)
        return found

    def trimmed(self, ids):
        return {**self.data, "vocab": kept_ids(self.tokens, ids)}


class Bpe(TokenModel):
    """Merges of neighbours, the first in the list first; a token needs all that is merged on the way to it."""

    type = "BPE"

    def __init__(self, data):
        super().__init__(data)
        self.pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in data["merges"]]
        self.ranks = {pair: rank for rank, pair in enumerate(self.pairs)}
        self.inside = data.get("continuing_subword_prefix") or ""
        self.end = data.get("end_of_word_suffix") or ""

    def always(self):
        return {token for token in self.tokens if token in BYTES or len(self.symbols(token)) == 1}

    def symbols(self, token: str) -> list[str]:
        """Return the characters that a token is merged from, marked as the model marks them."""
        text = token.removeprefix(self.inside)
        ends = bool(self.end) and text.endswith(self.end) and text != self.end
        found = [self.inside + character for character in (text.removesuffix(self.end) if ends else text)]
        if found and not (self.inside and token.startswith(self.inside)):
            found[0] = found[0].removeprefix(self.inside)
        if ends:
            found[-1] += self.end
        return found

    def rank(self, left: str, right: str) -> float:
        """Return the place of a merge in the list; infinity if there is none."""
        return self.ranks.get((left, right), float("inf"))

    def parts(self, token):
        symbols, found = self.symbols(token), set[str]()
        while len(symbols) > 1:
            found.update(symbols)
            rank, place = min((self.rank(*pair), place) for place, pair in enumerate(pairwise(symbols)))
            if rank == float("inf"):
                break  # the model takes this token whole, or never
            symbols[place : place + 2] = [self.merged(*symbols[place : place + 2])]
        return {each for each in found if each in self.tokens}

    def merged(self, left: str, right: str) -> str:
        return left + right.removeprefix(self.inside)

    def trimmed(self, ids):
        merges = [
            merge
            for pair, merge in zip(self.pairs, self.data["merges"], strict=True)
            if {*pair, self.merged(*pair)} <= ids.keys()
        ]
        return {**self.data, "vocab": kept_ids(self.tokens, ids), "merges": merges}


class Unigram(TokenModel):
    """The tokens whose scores have the largest sum."""

    type = "Unigram"

    def __init__(self, data):
        super().__init__(data)
        self.scores: Sequence[tuple[str, float]] = data["vocab"]
        self.tokens = {token for token, _ in self.scores}
        if len(self.tokens) < len(self.scores):
            twice = next(token for token, count in Counter(token for token, _ in self.scores).items() if count > 1)
            raise ArgumentError(f"the tokenizer has the token {twice!r:.80} twice: its vocabulary cannot be trimmed")

    def always(self):
        lowest = min(self.scores, key=lambda pair: pair[1])[0]  # unknown characters score ten less than this one
        found = {token for token in self.tokens if any(character not in self.tokens for character in token)}
        return {lowest} | found | {token for token in self.tokens if len(token) == 1 or token in BYTES}

    def trimmed(self, ids):
        unknown = self.data.get("unk_id")
        return {
            **self.data,
            "unk_id": None if unknown is None else ids[self.scores[unknown][0]],
            "vocab": [[token, score] for token, score in self.scores if token in ids],
        }


def kept_ids(tokens: Collection[str], ids: Mapping[str, int]) -> dict[str, int]:
    return {token: ids[token] for token in tokens if token in ids}


TOKEN_MODELS: Mapping[str, type[TokenModel]] = {each.type: each for each in (WordPiece, Bpe, Unigram)}
