"""The pages of error messages: each one that they quote is in the code, word for word."""

import ast
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from pages import PAGES, ROOT

TEXT = "\n".join(page.text for name, page in PAGES.items() if name.startswith("docs/troubleshooting"))
QUOTES = re.findall(r"^> `(.+)`$", TEXT, flags=re.MULTILINE)
TELLING = 14  # characters of fixed text by which a message is recognised
# Quotes that share an answer are variants of one message: all of them match one of these patterns.
VARIANTS = (
    r"belong to two models.*: save",
    r"^expected the transformers model inside a \w+: pass ",
    r"^cannot change a .* in place: ",
    r"does not say it can do '\w+'",
    r" already: .* first|is collaborative already: ",
    r"^dim_shared_query_key [\d.]+ for ",
    r"^batch(es| \d+) is a \w+, expected an? ",
    r" need \w+: pip install ",
)


def pieces(node: ast.AST, names: dict[str, str]) -> list[str | None] | None:
    """The fixed texts of a string in the code, with None for what is filled in; None for anything else."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = pieces(node.left, names), pieces(node.right, names)
        return None if None in sides else [*sides[0], *sides[1]]
    if not isinstance(node, ast.JoinedStr):
        return None
    found: list[str | None] = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            found.append(part.value)
        else:
            name = getattr(part.value, "id", "")
            found.append(names.get(name))
    return found


def texts_of(file: Path) -> set[tuple[str | None, ...]]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    made = (pieces(node, names) for node in ast.walk(tree))
    return {merged(parts) for parts in made if parts}


def merged(parts: list[str | None]) -> tuple[str | None, ...]:
    """The same with neighbouring fixed texts and percent signs of the logger resolved."""
    text = "\0".join("\1" if part is None else part for part in parts).replace("\0", "")
    text = text.replace("%s", "\1")
    return tuple(None if part == "\1" else part for part in re.split("(\1)", text) if part)


@cache
def messages() -> list[tuple[str | None, ...]]:
    """The texts of the package that tell enough."""
    files = (*(ROOT / "collab_heads").rglob("*.py"), *(ROOT / "adapters").glob("*.py"))
    return [parts for parts in set().union(*map(texts_of, files)) if tells(parts)]


def tells(parts: Sequence[str | None]) -> bool:
    return sum(len(part) for part in parts if part) >= TELLING


def fits(parts: Sequence[str | None], text: str) -> bool:
    """Whether a string with these parts can become a text, of which its fixed texts tell enough."""
    if not tells(parts) or not all(part in text for part in parts if part):
        return False
    return bool(re.fullmatch("".join(".*?" if part is None else re.escape(part) for part in parts), text, re.DOTALL))


def begins(parts: Sequence[str | None], text: str) -> bool:
    """The same for a text that ends early, within a fixed text."""
    first = next((part for part in parts if part), "")
    if first[:TELLING] not in text:
        return False
    for end, part in enumerate(parts):
        if part and any(
            text.endswith(part[:size]) and fits([*parts[:end], part[:size]], text) for size in range(1, len(part) + 1)
        ):
            return True
    return False


def is_said(quote: str) -> bool:
    """Whether a string of the package can become a quote, or, if the quote ends with "…", begin like it."""
    if quote.endswith("…"):
        return any(begins(parts, quote.removesuffix("…").rstrip()) for parts in messages())
    return any(fits(parts, quote) for parts in messages())


def test_every_message_is_in_the_code():
    assert [quote for quote in QUOTES if not is_said(quote)] == []


def without_answer(text: str) -> list[str]:
    """The quotes of a page that no text of their own, or of variants of one message, follows."""
    blocks, found, stack = [*re.split(r"\n\n+", text.strip()), "#"], [], []
    for block in blocks:
        if quote := re.fullmatch(r"> `(.+)`", block):
            stack.append(quote[1])
            continue
        alone = len(stack) < 2 or any(all(re.search(each, quote) for quote in stack) for each in VARIANTS)
        if stack and (block.startswith("#") or not alone):
            found += stack
        stack = []
    return found


def test_every_message_has_an_answer_of_its_own():
    assert without_answer(TEXT) == []


def test_a_message_without_an_answer_is_seen():
    one, variant = "batches is a str, expected an x", "batches is a dict, expected an x"
    other = "batches is empty: pass"
    assert without_answer(f"> `{one}`\n\n> `{variant}`\n\nTokenize.\n\n> `{other}`\n\nPass some.") == []
    assert without_answer(f"> `{one}`\n\n> `{other}`\n\nTokenize.") == [one, other]
    assert without_answer(f"> `{one}`\n\n# Next\n\n> `{other}`") == [one, other]


def test_there_are_messages():
    assert len(QUOTES) > 80 and len(set(QUOTES)) == len(QUOTES)
    assert TEXT.count("\n> ") == len(QUOTES)  # a quote of another form would not be looked for


def test_messages_that_nobody_says_are_seen():
    said = "budget=0.5 and max_error=0.1 exclude each other: give one"
    assert is_said(said)
    for wrong in (said.replace("give one", "give two"), said.removesuffix("one") + "1 …", "any text at all", "a: b: c"):
        assert not is_said(wrong)
