"""The tokens that a model needs whatever its users write: those that its configs name, and those of its own texts.

Its own texts are its chat template, and the prompts and prefixes that it puts first.

A field is known by its name, at any depth of dictionaries (`task_specific_params`). A test accounts for every field of
`GenerationConfig` and of each family's config (`tests/vocabulary/test_needed_ids.py`).
"""

import datetime
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.saving.source_files import MODULES, SETTINGS, source_of, stored
from collab_heads.serving.text_reader import OF_TEXTS

Ids = Mapping[Any, int]  # old -> new

ONE_ID = re.compile(r"(^|_)token_ids?$|_token_index$")
LABELS = ("id2label", "label2id")  # the names of classes are free text


def every_id(value: Any, ids: Ids) -> Any:
    """Renumber an id, or lists of them; ids that no token had stay."""
    if isinstance(value, list | tuple):
        return [every_id(each, ids) for each in value]
    return ids.get(value, value) if is_id(value) else value


def by_name(value: Any, ids: Ids) -> Any:
    return {key: every_id(each, ids) for key, each in value.items()} if isinstance(value, Mapping) else value


def second_of_each(value: Any, ids: Ids) -> Any:
    return [[place, every_id(each, ids)] for place, each in value]


def without_removed(value: Any, ids: Ids) -> Any:
    """Renumber ids, or lists of them, and leave out those with a token that is gone; None if all are."""
    return [new for new in (shortened(each, ids) for each in value) if new is not None] or None


def weighted(value: Any, ids: Ids) -> Any:
    """Renumber lists of ids that have a weight, and leave out those with a token that is gone; None if all are."""
    pairs = value.items() if isinstance(value, Mapping) else value
    found = [[key, weight] for key, weight in ((shortened(key, ids), weight) for key, weight in pairs) if key]
    return ({tuple(key): weight for key, weight in found} if isinstance(value, Mapping) else found) or None


def shortened(value: Any, ids: Ids) -> Any:
    """Return an id, or a list of them, renumbered; None if one of them is gone."""
    if isinstance(value, list | tuple):
        found = [ids.get(each) for each in value]
        return None if None in found else found
    return ids.get(value)


# pattern in the name of a field -> whether its tokens must stay, and how it is renumbered
FORMS: tuple[tuple[re.Pattern, bool, Callable[[Any, Ids], Any]], ...] = (
    (ONE_ID, True, every_id),
    (re.compile(r"^(pad|bos|eos|unk|mask|sep|cls)_(id|idx|index)$"), True, every_id),
    (re.compile(r"^(force|stop)_words_ids$"), True, every_id),
    (re.compile(r"^(lang(_code)?|task)_to_id$"), True, by_name),  # of Whisper and others
    (re.compile(r"^forced_decoder_ids$"), True, second_of_each),
    (re.compile(r"^((begin_)?suppress_tokens|bad_words_ids)$"), False, without_removed),  # must not come
    (re.compile(r"^sequence_bias$"), False, weighted),
)


def renumber(config: Any, ids: Ids) -> None:
    """Give the ids that a config names their new numbers, in place; ids that no token had stay."""
    for name, value in list(vars(config).items()):
        new = renumbered(name, value, ids)
        if new is not value:
            setattr(config, name, new)


def renumbered(name: str, value: Any, ids: Ids, must_stay: bool = False) -> Any:
    """Return a field with new ids.

    Args:
        name: of the field, or of an entry in it.
        value: it is not changed; returned itself if it holds no ids.
        ids: old -> new.
        must_stay: take the fields whose tokens must stay alone.
    """
    if value is None or name in LABELS:
        return value
    for pattern, stays, form in FORMS:
        if pattern.search(name):
            return form(value, ids) if stays or not must_stay else value
    if isinstance(value, dict):
        found = {key: renumbered(str(key), each, ids, must_stay) for key, each in value.items()}
        return found if any(found[key] is not value[key] for key in value) else value
    return value


class Asked(dict):
    """Remembers which ids were asked for."""

    def get(self, key, default=None):
        self[key] = key
        return key


def ids_of(config: Any) -> set[int]:
    """Return the ids that a config names, and that a model therefore needs."""
    asked = Asked()
    for name, value in vars(config).items():
        renumbered(name, value, asked, must_stay=True)
    return set(asked)


def is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def configs_of(model: PreTrainedModel) -> list[Any]:
    """Return the configs of a model and its parts, and of its generation, each once."""
    found: dict[int, Any] = {}

    def enter(config: Any) -> None:
        if config is not None and id(config) not in found:
            found[id(config)] = config
            for value in vars(config).values():
                if isinstance(value, PretrainedConfig):
                    enter(value)

    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            enter(part.config)
            enter(getattr(part, "generation_config", None))
    return list(found.values())


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


def encoder_folders(model: PreTrainedModel) -> list[Path]:
    """Return the folders that may hold the settings of a sentence encoder."""
    source = source_of(model.config)
    if source is None:
        return []
    return [source, *([source.parent] if (source.parent / MODULES).is_file() else [])]  # older ones have it in one


def reads_lower_case(model: PreTrainedModel) -> bool:
    """Return True if texts are lower-cased before the tokenizer sees them: a setting of sentence-transformers."""
    return any(stored(folder / OF_TEXTS, "do_lower_case") is True for folder in encoder_folders(model))


def prompts(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    for folder in encoder_folders(model):
        said = stored(folder / SETTINGS, "prompts")
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
