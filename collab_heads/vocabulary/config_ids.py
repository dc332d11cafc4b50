"""The ids of tokens in configs: which must stay, and what they become.

A field is known by its name, at any depth of dictionaries (`task_specific_params`). A test accounts for every field of
`GenerationConfig` and of each family's config (`tests/vocabulary/test_config_ids.py`).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

Ids = Mapping[Any, int]  # old -> new

ONE_ID = re.compile(r"(^|_)token_ids?$|_token_index$")
LABELS = ("id2label", "label2id")  # the names of classes are free text


def every_id(value: Any, ids: Ids) -> Any:
    """Renumber an id, or lists of them; ids that no token had stay."""
    if isinstance(value, list | tuple):
        return [every_id(each, ids) for each in value]
    return ids.get(value, value) if is_id(value) else value


def by_name(value: Any, ids: Ids) -> Any:
    """Renumber the values of a dictionary."""
    return {key: every_id(each, ids) for key, each in value.items()} if isinstance(value, Mapping) else value


def second_of_each(value: Any, ids: Ids) -> Any:
    """Renumber the ids in pairs of a place and an id."""
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
