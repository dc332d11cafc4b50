"""Read sentences with dependencies from CoNLL-U. Errors name the file and the line."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from collab_heads.errors import DataError
from collab_heads.files.reading import check_field, read_text

COLUMNS = 10  # id, form, lemma, upos, xpos, feats, head, deprel, deps, misc
# ids of at most nine digits: `int` refuses thousands of them
WORD, RANGE, EMPTY_NODE = r"[1-9]\d{0,8}", r"([1-9]\d{0,8})-([1-9]\d{0,8})", r"\d+\.[1-9]\d*"
HEAD = r"\d{1,9}"

Span = tuple[int, int]


@dataclass(frozen=True)
class Sentence:
    """A sentence and its dependencies.

    Words are syntactic words: "don't" is two. Empty nodes are left out.

    Attributes:
        words: the forms of the words.
        heads: the number of each word's head, from 1; 0 for the root.
        relations: the relation of each word to its head, with its subtype: "nsubj", "nsubj:pass", "root".
        text: the sentence as written: its `# text` comment, else the tokens, spaced as SpaceAfter says.
        spans: start and end of every word in the text. The words of a multiword token share its span if their forms do
            not make up its own: French "du" for both "de" and "le", while "do" and "n't" have their own.
        sent_id: its `# sent_id` comment, or None.
        line: the number of the line of its first word.
    """

    words: tuple[str, ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]
    text: str
    spans: tuple[Span, ...]
    sent_id: str | None = None
    line: int = 0


@dataclass
class Token:
    """A token of the text: a word, or several that are written as one.

    Attributes:
        form: the form as written.
        last: the number of its last word; its first word follows the previous token.
        space: whether a space follows.
        line: the number of its line.
    """

    form: str
    last: int
    space: bool
    line: int


@dataclass
class Draft:
    """A sentence under construction.

    Attributes:
        words: form, head, relation and line number of every word.
        tokens: the tokens of its text.
        comments: name -> value.
    """

    words: list[tuple[str, int, str, int]] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    comments: dict[str, str] = field(default_factory=dict)


class BrokenLine(Exception):
    """An error in a line of the file, with the number of the line."""

    def __init__(self, number: int, what: str):
        super().__init__(what)
        self.number = number


def read_conllu(path: str | Path) -> list[Sentence]:
    """Read a treebank from a CoNLL-U file, plain or compressed with gzip (`.gz`).

    Args:
        path: the file, in UTF-8; Windows line ends and a byte-order mark are accepted.

    Returns:
        The sentences, in order.

    Raises:
        DataError: if the file is missing, damaged, not UTF-8 or without sentences, or if a line is broken: not ten
            columns, an id out of order, no form, head or relation, a head that the sentence does not have, a word that
            is its own head, no root, a text that does not contain the words. The message names the file and the line.

    Source: the format: universaldependencies.org/format.html.
    """
    path = Path(path)
    sentences, draft = [], Draft()
    for number, line in lines_of(path):
        try:
            if line.startswith("#"):
                name, equals, value = line[1:].partition("=")
                if equals:
                    draft.comments[name.strip()] = value.strip()
            elif line.strip():
                add_line(draft, line, number)
            else:
                sentences += finish(draft)
                draft = Draft()
        except BrokenLine as error:
            raise DataError(f"{path}, line {error.number}: {error}") from error
    if not sentences:
        raise DataError(f"{path} has no sentences; CoNLL-U has a word with ten tab-separated columns on a line")
    return sentences


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    # not splitlines: forms may hold other characters that it takes for line ends
    lines = [line.removesuffix("\r") for line in read_text(path).split("\n")]
    for number, line in enumerate(lines, 1):
        check_field(f"{path}, line {number}", None, line)
    return enumerate([*lines, ""], 1)


def add_line(draft: Draft, line: str, number: int) -> None:
    """Add the word or multiword token of a line to a sentence, or raise BrokenLine; empty nodes are ignored."""
    cells = line.split("\t")
    if len(cells) != COLUMNS:
        raise BrokenLine(number, f"{len(cells)} tab-separated columns, expected {COLUMNS}: {shorten(line)}")
    if re.fullmatch(EMPTY_NODE, cells[0]):
        return  # it has no basic dependency and is not in the text
    following, covered = len(draft.words) + 1, draft.tokens[-1].last if draft.tokens else 0
    if not cells[1] or cells[1].isspace():
        raise BrokenLine(number, f"id {cells[0]!r} has no form")
    space = "SpaceAfter=No" not in cells[9].split("|")
    if match := re.fullmatch(RANGE, cells[0]):
        first, last = int(match[1]), int(match[2])
        if first != following or covered >= first or last <= first:
            raise BrokenLine(
                number, f"range {cells[0]}: it must start with the next word, {following}, and have two words"
            )
        draft.tokens.append(Token(cells[1], last, space, number))
        return
    if not re.fullmatch(WORD, cells[0]) or int(cells[0]) != following:
        raise BrokenLine(
            number, f"id {cells[0]!r}, expected {following} (is there no empty line between two sentences?)"
        )
    if not re.fullmatch(HEAD, cells[6]):
        raise BrokenLine(number, f"head {shorten(cells[6])} of word {following} is not a number: is the file parsed?")
    if cells[7] in ("", "_"):
        raise BrokenLine(number, f"word {following} has a head and no relation")
    draft.words.append((cells[1], int(cells[6]), cells[7], number))
    if covered < following:
        draft.tokens.append(Token(cells[1], following, space, number))


def finish(draft: Draft) -> list[Sentence]:
    """Check a draft and return its sentence in a list, which is empty for comments alone; or raise BrokenLine."""
    if not draft.words:
        if draft.tokens:
            raise BrokenLine(draft.tokens[0].line, "a multiword token without its words")
        return []
    forms, heads, relations, numbers = (tuple(each) for each in zip(*draft.words, strict=True))
    count = len(forms)
    if draft.tokens[-1].last > count:
        raise BrokenLine(draft.tokens[-1].line, f"a range to word {draft.tokens[-1].last} of {count} words")
    for word, (head, number) in enumerate(zip(heads, numbers, strict=True), 1):
        if head > count or head == word:
            wrong = "is its own head" if head == word else f"has head {head}; there are {count} words"
            raise BrokenLine(number, f"word {word} {wrong}")
    if 0 not in heads:
        raise BrokenLine(numbers[0], "the sentence that starts here has no root (a word with head 0)")
    text = draft.comments.get("text") or "".join(t.form + " " * t.space for t in draft.tokens).rstrip()
    spans = spans_of_words(forms, draft.tokens, spans_of_tokens(text, draft.tokens))
    return [Sentence(forms, heads, relations, text, spans, draft.comments.get("sent_id"), numbers[0])]


def spans_of_tokens(text: str, tokens: Sequence[Token]) -> list[Span]:
    """Return the spans of consecutive tokens, with only spaces between them, or raise BrokenLine."""
    spans, end = [], 0
    for token in tokens:
        while end < len(text) and text[end].isspace():
            end += 1
        if not text.startswith(token.form, end):
            raise BrokenLine(
                token.line,
                f"{token.form!r}, where '# text' has {shorten(text[end:])}: mend that comment, or leave it out",
            )
        spans.append((end, end + len(token.form)))
        end += len(token.form)
    if text[end:].strip():
        raise BrokenLine(tokens[-1].line, f"after the last word, '# text' goes on with {shorten(text[end:].strip())}")
    return spans


def spans_of_words(forms: Sequence[str], tokens: Sequence[Token], spans: Sequence[Span]) -> tuple[Span, ...]:
    """Divide each token's span among its words; all get the whole span if they do not make up its form."""
    word_spans: list[Span] = []
    for token, (start, end) in zip(tokens, spans, strict=True):
        inside = forms[len(word_spans) : token.last]
        whole = "".join(inside) == token.form
        for form in inside:
            word_spans.append((start, start + len(form)) if whole else (start, end))
            start += len(form) if whole else 0
    return tuple(word_spans)


def shorten(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
