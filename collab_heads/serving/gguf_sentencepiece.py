"""SentencePiece tokenizers in a GGUF file: an order of merges becomes a score of each token.

A `tokenizer.json` lists pairs of tokens, and merges the pair that comes first in the list. llama.cpp merges any
two neighbours that are a token together, the token of the highest score first. Both cut texts alike if each such pair
is in the list, and those of a token stand beside each other there. Where this is not so, short texts are tried: a token
by itself, or three neighbours of which both might merge other two. That is enough, since what becomes of neighbours
hardly depends on what stands around them.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

SENTENCEPIECE = "SentencePiece"  # how forms call byte-fallback BPE, which `tokenizer.json` calls BPE, too
SPACE = "\u2581"  # stands for a space
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
NEVER = float("inf")
REPLACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
PREPENDS = {"type": "Prepend", "prepend": SPACE}


class Prefix(NamedTuple):
    """A space that stands before a text: whether there is one, also before a space, and after special tokens."""

    is_there: bool
    before_spaces: bool
    after_special: bool


# the schemes of the step Metaspace; llama.cpp has the first one, and that of the two steps Prepend and Replace
NO_PREFIX, PREFIX = Prefix(False, False, False), Prefix(True, True, True)
SCHEMES = {"never": NO_PREFIX, "always": Prefix(True, False, True), "first": Prefix(True, False, False)}


def is_sentencepiece(model: Mapping[str, Any]) -> bool:
    """Return True for the entry `model` of a tokenizer that merges characters, and spells unknown ones as bytes."""
    return model["type"] == "BPE" and bool(model.get("byte_fallback"))


def prefix_of(parts: Mapping[str, Any]) -> Prefix | None:
    """Return what a `tokenizer.json` puts before a text; None if it does anything else with texts than llama.cpp."""
    cleaned, cut = (parts.get(step) or {} for step in ("normalizer", "pre_tokenizer"))
    steps = cleaned.get("normalizers", [cleaned] if cleaned else [])
    if not cut:
        return {1: NO_PREFIX, 2: PREFIX}.get(len(steps)) if steps in ([REPLACES], [PREPENDS, REPLACES]) else None
    if steps or cut["type"] != "Metaspace" or cut.get("replacement") != SPACE:
        return None
    crosses_words = any(SPACE in token[1:] for token in parts["model"]["vocab"])
    return None if cut.get("split", True) and crosses_words else SCHEMES.get(cut["prepend_scheme"])


def why_not(parts: Mapping[str, Any]) -> str:
    """Return what llama.cpp does otherwise than the tokenizer of a `tokenizer.json`, in words; "" for nothing."""
    model, prefix = parts["model"], prefix_of(parts)
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout", "ignore_merges"):
        if model.get(name):
            return f"its model has {name}={model[name]!r}, and llama.cpp has not"
    if prefix is None:
        steps = [json_name(parts.get(step)) for step in ("normalizer", "pre_tokenizer")]
        return f"it has the steps {' and '.join(steps)}: llama.cpp makes spaces {SPACE!r}, and puts one before a text"
    if missing := next((token for token in BYTES if token not in model["vocab"]), None):
        return f"it has no token {missing!r}, and llama.cpp ends the process where it needs one"
    added = {token["content"]: token for token in parts.get("added_tokens", ())}
    if prefix == PREFIX and (changed := next((name for name, token in added.items() if token["normalized"]), None)):
        return f"it finds its token {changed!r} in texts that have their space, and llama.cpp before"
    merges = Merges(model["merges"], model["vocab"] | added)
    if (text := merges.differing_text(added.keys())) is None:
        return ""
    found, expected = (" ".join(cut(text, each)) for each in (merges.score, merges.rank))
    return f"it cuts {text!r} into {expected}, and llama.cpp, which has a score for each token, into {found}"


def json_name(step: Mapping[str, Any] | None) -> str:
    """Return the names of the steps in an entry of a `tokenizer.json`."""
    steps = next((value for value in (step or {}).values() if isinstance(value, list)), [step] if step else [])
    return ", ".join(each["type"] for each in steps) or "none"


class Merges:
    """The merges of a tokenizer, and the scores that say the same.

    Args:
        pairs: the merges, the first in the list first.
        vocabulary: all tokens.

    Attributes:
        ranks: pair -> its place in the list.
        first: token -> the place of the first pair that makes it; pairs beside each other that make one have one place.
    """

    def __init__(self, pairs: Sequence[Any], vocabulary: Collection[str]):
        self.vocabulary, self.first, self.places = vocabulary, dict[str, int](), dict[tuple[str, str], int]()
        self.ranks = {tuple(each.split(" ") if isinstance(each, str) else each): i for i, each in enumerate(pairs)}
        last, place = "", 0
        for number, pair in enumerate(self.ranks):
            token = "".join(pair)
            last, place = token, place if token == last else number
            self.places[pair] = place
            self.first.setdefault(token, place)

    def rank(self, left: str, right: str) -> float:
        """Return when a tokenizer merges two neighbours; infinity for never."""
        return self.ranks.get((left, right), NEVER)

    def score(self, left: str, right: str) -> float:
        """Return when llama.cpp merges two neighbours, which is minus the score of the token; infinity for never."""
        token = left + right
        return self.first.get(token, len(self.ranks)) if token in self.vocabulary else NEVER

    def differing_text(self, whole: Collection[str]) -> str | None:
        """Return a text that both cut otherwise; None if there is none.

        Args:
            whole: tokens that are found in texts before they are cut.
        """
        return next((each for each in self.doubtful(whole) if cut(each, self.rank) != cut(each, self.score)), None)

    def doubtful(self, whole: Collection[str]) -> Iterator[str]:
        """Yield the texts that both might cut otherwise."""
        known = self.vocabulary
        for token in known:  # two neighbours that are a token, and no pair of the list
            parts = ((token[:end], token[end:]) for end in range(1, len(token)))
            if token not in whole and any(
                pair not in self.ranks for pair in parts if all(len(each) == 1 or each in known for each in pair)
            ):
                yield token
        begins, ends = defaultdict(list), defaultdict(list)
        for left, right in self.ranks:
            begins[left].append(right)
            ends[right].append(left)
        for (left, right), place in self.places.items():
            token = left + right
            if place != self.first[token]:  # later in the list than its score says: what may come between, in a text?
                beside = [((right, each), token + each) for each in begins[right]]
                beside += [((each, left), each + token) for each in ends[left]]
                for pair, text in beside:
                    if self.places[pair] < place and self.first[token] <= self.first["".join(pair)]:
                        yield text


def cut(text: str, when: Callable[[str, str], float]) -> list[str]:
    """Return the tokens of a text: the pair of neighbours that comes first is merged first, of several the leftmost."""
    found = list(text)
    while len(found) > 1:
        first, place = min((when(*pair), place) for place, pair in enumerate(pairwise(found)))
        if first == NEVER:
            break
        found[place : place + 2] = [found[place] + found[place + 1]]
    return found
