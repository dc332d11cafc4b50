"""The sizes in the config of a folder, looked at before anything is built from them.

Transformers builds what a config asks for: a billion layers, one after the other, or a list of their types that fills
the memory while the config is read.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from transformers.utils import CONFIG_NAME

from collab_heads.checks import MAX_SIZE
from collab_heads.errors import ArgumentError

MAX_LAYERS = 2000  # the deepest models have about a thousand
BOUNDS = (  # what is in the name of a field -> the most that it can be
    (re.compile(r"layer|depth"), MAX_LAYERS),
    (re.compile(r"size|dim|head|position|label|width|group|d_model|d_ff|d_kv|n_embd|n_inner|n_ctx"), MAX_SIZE),
)
OF_LABELS = "label2id"  # its keys are words of whoever trained the model


def check_sizes(source: str) -> None:
    """Raise ArgumentError if a config, or the one in a folder, names a size that no model has; the field is named."""
    file = Path(source) if Path(source).is_file() else Path(source) / CONFIG_NAME
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # whoever loads it says what is wrong
        return
    for name, value in numbers(config):
        most = next((bound for pattern, bound in BOUNDS if pattern.search(name)), None)
        if most is not None and value > most:
            raise ArgumentError(
                f"{file}: {name} is {value!r:.40}, and no model has more than {most:,}: the file is damaged or edited"
            )


def numbers(part: object, name: str = "") -> Iterator[tuple[str, int | float]]:
    """The numbers in a part of a config, with the names of their fields."""
    if isinstance(part, dict):
        for key, value in part.items():
            yield from () if key == OF_LABELS else numbers(value, str(key))
    elif isinstance(part, list):
        for value in part:
            yield from numbers(value, name)
    elif isinstance(part, int | float) and not isinstance(part, bool):
        yield name, part
