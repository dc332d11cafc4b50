"""Files of flags: JSON, or YAML where PyYAML is installed; `collab-heads glue config.json --seed 1`."""

import json
from collections.abc import Mapping
from typing import Any

from collab_heads.errors import DataError
from collab_heads.extras import check_extra
from collab_heads.reading import parse_json, read_text

YAML = (".yaml", ".yml")
SUFFIXES = (".json", *YAML)


def is_flag_file(argument: str) -> bool:
    """Whether the first argument of a command is a file of flags, by its name."""
    return not argument.startswith("-") and argument.lower().endswith(SUFFIXES)


def read_flags(file: str) -> dict[str, Any]:
    """Read the flags of a file: names, with or without the two hyphens, and values.

    Raises:
        DataError: if there is no such file, or it holds anything else.
        MissingPackageError: if it is YAML and PyYAML is not installed.
    """
    try:
        text = read_text(file)
        flags = parse_yaml(text) if file.lower().endswith(YAML) else parse_json(text)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{file}: not a file of flags: {str(error).splitlines()[0]}") from error
    if not isinstance(flags, dict):
        raise DataError(f'{file}: a file of flags is one object, such as {{"seed": 1}}, not a {type(flags).__name__}')
    return {str(name).removeprefix("--"): value for name, value in flags.items()}


def parse_yaml(text: str) -> Any:
    """What a YAML text holds; plain values only."""
    check_extra("yaml", "flags in YAML")
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from error


def as_argument(value: Any) -> str:
    """A value as it is written on the command line: {"enc-self": 32} as enc-self=32."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ",".join(f"{name}={as_argument(each)}" for name, each in value.items())
    if isinstance(value, list) or value is None:
        raise ValueError(f"{json.dumps(value)} is not one value")
    if isinstance(value, bool):
        raise ValueError(f'{json.dumps(value)} is no value for it (a word, such as "no", is written in quotes)')
    return repr(value)
