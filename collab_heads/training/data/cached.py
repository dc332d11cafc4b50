"""What runs keep for the next ones: what they download, and tokenized pairs."""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants as hub
from datasets import Dataset, load_from_disk
from transformers import PreTrainedTokenizerBase

from collab_heads.folders import damage, read_manifest, write_folder

TOKENIZED = "tokenized"


@contextmanager
def kept_in(folder: str | None) -> Iterator[None]:
    """Let what is downloaded while the context is open be kept in a folder; None for the usual one."""
    before = hub.HF_HUB_CACHE, datasets.config.HF_DATASETS_CACHE
    if folder is not None:
        hub.HF_HUB_CACHE, datasets.config.HF_DATASETS_CACHE = str(Path(folder) / "hub"), Path(folder) / "datasets"
    try:
        yield
    finally:
        hub.HF_HUB_CACHE, datasets.config.HF_DATASETS_CACHE = before


def tokenized_in(folder: str | None, name: str, make: Callable[[], Dataset]) -> Dataset:
    """A tokenized split: read from a folder, or made and kept there; without a folder it is only made.

    Args:
        folder: where it is kept; None for nowhere.
        name: says all that it depends on, see `digest_of_tokens`.
        make: makes it.

    Raises:
        OutputError: if it cannot be written.
    """
    if folder is None:
        return make()
    place = Path(folder) / TOKENIZED / name
    if read_manifest(place) is None or damage(place):
        made = make()
        place.parent.mkdir(parents=True, exist_ok=True)
        write_folder(place, lambda partial: made.save_to_disk(str(partial)), made.data.nbytes)
    return load_from_disk(str(place))


def digest_of_tokens(
    pairs: Mapping[str, Sequence[str]], tokenizer: PreTrainedTokenizerBase, settings: Sequence[Any]
) -> str:
    """A name for what a tokenizer makes of pairs: it changes with each sentence, file of the tokenizer, and setting."""
    sha256 = hashlib.sha256(json.dumps([type(tokenizer).__name__, *settings]).encode())
    for side in sorted(pairs):
        for sentence in pairs[side]:
            sha256.update(json.dumps([side, sentence]).encode())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).rglob("*")):
            if file.is_file():
                sha256.update(file.name.encode() + b"\0" + file.read_bytes())
    return sha256.hexdigest()[:32]
