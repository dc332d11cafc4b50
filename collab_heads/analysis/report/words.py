"""Words of a sentence, from the marks that vocabularies put on their pieces."""

import re
from collections.abc import Sequence
from typing import Any

# vocabularies mark the pieces that begin a word (sentencepiece, byte-level), those that do not (WordPiece), the pieces
# that end a word (CLIP), or those that do not (fastBPE)
BEGINS, INSIDE, ENDS, GOES_ON = ("\u2581", "\u0120", "\u010a"), "##", "</w>", "@@"
SPECIAL = re.compile(r"<[^<>]+>|\[[A-Z]+\]")  # such as <s>, <|im_end|>, [CLS]
OPEN_BOX = "\u2423"  # what a mark of a space is shown as


def words_of(tokens: Sequence[str], texts: Sequence[str]) -> dict[str, Any] | None:
    """Return the words of a sentence; None if its tokens have no marks, so that nothing tells where words begin.

    Special tokens and punctuation are words of their own, in every vocabulary.

    Args:
        tokens: the tokens, as the vocabulary has them.
        texts: the same, as they are shown.

    Returns:
        starts: the place of the first piece of each word. texts: the words.
    """
    if not any(is_marked(token) for token in tokens):
        return None
    starts = [place for place in range(len(tokens)) if not place or begins(tokens, place)]
    ends = [*starts[1:], len(tokens)]
    return {"starts": starts, "texts": [joined(texts[a:b]) for a, b in zip(starts, ends, strict=True)]}


def is_marked(token: str) -> bool:
    return token.startswith((*BEGINS, INSIDE)) or token.endswith((ENDS, GOES_ON))


def begins(tokens: Sequence[str], place: int) -> bool:
    """Return whether a piece begins a word, by its mark, by that of the piece before, and by what both are."""
    before, token = tokens[place - 1], tokens[place]
    if token.startswith(BEGINS) or stands_alone(token) or stands_alone(before):
        return True
    if any(each.startswith(INSIDE) for each in tokens):
        return not token.startswith(INSIDE)
    if any(each.endswith(GOES_ON) for each in tokens):
        return not before.endswith(GOES_ON)
    return before.endswith(ENDS)


def stands_alone(token: str) -> bool:
    """Return whether a token is special or punctuation; a mark without a word is neither."""
    if SPECIAL.fullmatch(token):
        return True
    text = token.removesuffix(ENDS).removesuffix(GOES_ON).removeprefix(INSIDE).lstrip("".join(BEGINS))
    return bool(text) and not any(letter.isalnum() for letter in text)


def joined(texts: Sequence[str]) -> str:
    """Return a word without the marks of its pieces; a mark alone stays as it is."""
    pieces = [text.removeprefix(INSIDE).removesuffix(ENDS).removesuffix(GOES_ON) for text in texts]
    return "".join(pieces).strip(OPEN_BOX) or "".join(texts)
