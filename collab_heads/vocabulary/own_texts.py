"""The texts that a model reads and no user writes: its chat template, the prompts and prefixes that it puts first."""

import datetime
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.errors import DataError
from collab_heads.files.reading import parse_json, read_text
from collab_heads.model.tokenizer_files import source_of
from collab_heads.vocabulary.config_ids import configs_of

SETTINGS = "config_sentence_transformers.json"
FIRST = re.compile(r"(^|_)(prefix|prompt|instruction)(es|s)?$")  # in the name of a field of a config
NOW = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")  # in a chat template
DAYS = 48  # of different months, days and years that a template may write
CONTENT = "\ue000"  # of a message; no template has this character
OPENERS = ((), ("system",), ("developer",))
TALKS = (("user",), ("user", "assistant"), ("user", "assistant", "user"), ("user", "call", "tool"))
CALLED = {"name": CONTENT, "arguments": {CONTENT: CONTENT}}
TOOL = {
    "type": "function",
    "function": {
        "name": CONTENT,
        "description": CONTENT,
        "parameters": {"type": "object", "properties": {CONTENT: {"type": "string", "description": CONTENT}}},
    },
}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALLED}]}
SWITCHES = [
    {"add_generation_prompt": prompt, "enable_thinking": thinks, **tools}
    for prompt, thinks, tools in itertools.product((False, True), (False, True), ({}, {"tools": [TOOL]}))
]


@dataclass(frozen=True)
class OwnText:
    """A text that a model reads.

    Attributes:
        where: what it comes from, for the report.
        text: the text, with a word of a user where one follows.
        prefixes: what stands in the same line before the texts of users.
    """

    where: str
    text: str
    prefixes: tuple[str, ...] = ()


def own_texts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, word: str) -> list[OwnText]:
    """Return the texts that a model reads and no user writes, each once.

    They are found in the chat template of its tokenizer, in its configs, and in the sentence-transformers folder that
    it was loaded from.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        word: stands for what a user writes.
    """
    found = [*prompts(model), *(each for config in configs_of(model) for each in prefixes(vars(config)))]
    first = [OwnText(where, text + word, (text.rsplit("\n", 1)[-1],)) for where, text in found if text]
    return list(dict.fromkeys([*first, *chats(tokenizer, word)]))


def prompts(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Yield the prompts of the sentence-transformers folder that a model was loaded from."""
    source = source_of(model.config)
    for folder in () if source is None else (source, source.parent):
        if folder != source and not (folder / "modules.json").is_file():  # older folders have the model in one of them
            continue
        try:
            said = parse_json(read_text(folder / SETTINGS)).get("prompts")
        except (DataError, ValueError, AttributeError):  # none, or damaged: whoever loads it is told
            continue
        for name, text in said.items() if isinstance(said, Mapping) else ():
            if isinstance(text, str):
                yield f"prompt {name!r}", text


def prefixes(fields: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in the fields of a config, or of a dictionary in it, that are put before what a user writes."""
    for name, value in fields.items():
        path = f"{where}.{name}" if where else str(name)
        if FIRST.search(str(name)):
            each = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
            yield from ((path, text) for text in each if isinstance(text, str))
        elif isinstance(value, dict):
            yield from prefixes(value, path)


def chats(tokenizer: PreTrainedTokenizerBase, word: str) -> Iterator[OwnText]:
    """Yield what the chat templates of a tokenizer write around messages: each role, switch and date."""
    stored: Any = getattr(tokenizer, "chat_template", None)
    templates = stored.values() if isinstance(stored, Mapping) else [stored]
    for template in (each for each in templates if isinstance(each, str)):
        texts = [
            rendered(tokenizer, template, [*opener, *talk], switches)
            for opener, talk, switches in itertools.product(OPENERS, TALKS, SWITCHES)
        ]
        for day in days() if NOW.search(template) else ():
            dated = NOW.sub(lambda match, day=day: repr(day.strftime(match[2])), template)  # type: ignore[misc]
            texts.append(rendered(tokenizer, dated, ["user"], {}))
        for text in filter(None, texts):
            before = tuple(part.rsplit("\n", 1)[-1] for part in text.split(CONTENT)[:-1])
            yield OwnText("chat template", text.replace(CONTENT, word), before)


def rendered(tokenizer: PreTrainedTokenizerBase, template: str, roles: Sequence[str], switches: Mapping) -> str:
    """Return a conversation as a template writes it; empty if the template refuses it."""
    messages: list[Any] = [CALL if role == "call" else {"role": role, "content": CONTENT} for role in roles]
    try:
        return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **switches))
    except Exception:  # templates raise what they like about roles that they do not have
        return ""


def days() -> Iterator[datetime.date]:
    """Yield days of every month, every day of a month and the next years."""
    first = datetime.date.today().year
    for number in range(DAYS):
        yield datetime.date(first + number // 12, 1 + number % 12, 1 + number % 28)
    yield from (datetime.date(first, 1, day) for day in (29, 30, 31))


def with_first_words(own: Sequence[OwnText], texts: Sequence[Any]) -> list[str]:
    """Return the beginnings of texts as they are read behind a prefix: their first word may be another token there."""
    before = sorted({prefix for each in own for prefix in each.prefixes} - {""})
    given = (text if isinstance(text, str) else text[0] for text in texts) if before else ()
    words = sorted({(text.split(maxsplit=1) or [""])[0] for text in given})
    return [prefix + word for prefix in before for word in words]
