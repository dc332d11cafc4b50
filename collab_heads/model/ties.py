"""What ties stored weights to the record that they belong to.

Weights of two changed models may agree in every name and shape: of one that lost head 1, and one that lost head 2. So
each file of weights says in its metadata which records it belongs to, by digests, and a load compares. It names
several: the text model of a CLIP loads alone from the files of the whole, by the config that it has in it.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from transformers import PretrainedConfig

from collab_heads.errors import ConfigError
from collab_heads.record import CollabConfig, configs_in

TIE = "collab_heads"  # in the metadata of a file of weights
WEIGHTS = ".safetensors"
MAX_HEADER = 100_000_000  # bytes; safetensors reads no longer ones
AGAIN = "load it with the config that was saved with it, or save the model again"


def tie(config: PretrainedConfig) -> str:
    """A short name for the changes that a config and those in it record; of one without, for its type of model."""
    changes = json.dumps(recorded(config) or config.model_type, sort_keys=True)
    return hashlib.sha256(changes.encode()).hexdigest()[:32]


def recorded(config: PretrainedConfig) -> dict:
    """The changed sites of a config, and of the changed ones among those in it."""
    inner = {name: recorded(each) for name, each in configs_in(config).items()}
    parts = {"sites": CollabConfig.alone(config).to_dict()["sites"], "configs": {k: v for k, v in inner.items() if v}}
    return {name: part for name, part in parts.items() if part}


def ties(config: PretrainedConfig) -> set[str]:
    """The names for a config and for those in it, which load alone from the files of the whole."""
    return {tie(config)}.union(*map(ties, configs_in(config).values()))


def metadata(config: PretrainedConfig) -> dict[str, str]:
    """What is to stand in the metadata of the weights of a model with this config; nothing if it is unchanged."""
    return {TIE: " ".join(sorted(ties(config)))} if recorded(config) else {}


def check_tie(config: PretrainedConfig, files: Iterable[str | Path]) -> bool:
    """Check that files of weights belong to the record of a config.

    Returns:
        Whether they say so. Those that `save_pretrained` did not write, such as accelerate's, say nothing.

    Raises:
        ConfigError: if they belong to another record; the file is named.
    """
    wanted, untied = tie(config), []
    apart = getattr(type(config), "extra_files", ())  # which some type of model keeps beside its weights
    paths = [path for path in map(Path, files) if path.name not in apart]
    for file in paths:
        found = read_metadata(file).get(TIE)
        if found is None:
            untied.append(file)
        elif wanted not in found.split():
            says = "records another change of attention" if recorded(config) else "records no change of attention"
            raise ConfigError(
                f"{file} does not belong to its config: the weights are those of a changed model, and the config "
                f"{says}. A save into {file.parent} may have been interrupted, or one of the two files copied, "
                f"edited or written by another program: {AGAIN}"
            )
    if untied and len(untied) < len(paths):
        raise ConfigError(
            f"{untied[0]} does not belong to the files beside it: these hold the weights of a changed model, and it "
            f"does not. A save into {untied[0].parent} may have been interrupted: save the model again"
        )
    return not untied


def is_tied(file: Path) -> bool:
    """Whether a file holds the weights of a changed model."""
    return TIE in read_metadata(file)


def read_metadata(file: Path) -> Mapping[str, str]:
    """The metadata of a file of weights; none of what is no such file, which whoever reads the weights says."""
    if file.suffix != WEIGHTS:
        return {}
    try:
        with file.open("rb") as opened:
            found = read_header(opened).get("__metadata__")
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_header(opened: BinaryIO) -> dict:
    """The names, shapes and metadata in a file of weights that was just opened."""
    size = int.from_bytes(opened.read(8), "little")
    if size > MAX_HEADER:
        raise ValueError("it is no safetensors file")
    return json.loads(opened.read(size))


def sort_metadata(file: Path) -> None:
    """Put the metadata of a file in order: safetensors writes several entries in any, and files would differ."""
    with file.open("r+b") as opened:
        header = read_header(opened)
        size = opened.tell() - 8
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        if len(text) == size:
            opened.seek(8)
            opened.write(text)
