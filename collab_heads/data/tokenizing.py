"""Train tokenizers; keep downloads and tokenized pairs for later runs; tokenize in several processes."""

import hashlib
import io
import json
import multiprocessing
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants as hub
import sentencepiece
from datasets import Dataset, load_from_disk
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from collab_heads.base.checks import check_choice
from collab_heads.base.progress import progress_bar
from collab_heads.contract.registry import blueprints
from collab_heads.data.batches import chunked, tokenize
from collab_heads.errors import DataError
from collab_heads.files.folders import alone_in, damage, read_manifest, write_folder
from collab_heads.files.locks import InUseError

TOKENIZED = "tokenized"


@contextmanager
def kept_in(folder: str | None) -> Iterator[None]:
    """Keep what is downloaded while the context is open in a folder; None for the usual one."""
    before = hub.HF_HUB_CACHE, datasets.config.HF_DATASETS_CACHE
    if folder is not None:
        hub.HF_HUB_CACHE, datasets.config.HF_DATASETS_CACHE = str(Path(folder) / "hub"), Path(folder) / "datasets"
    try:
        yield
    finally:
        hub.HF_HUB_CACHE, datasets.config.HF_DATASETS_CACHE = before


def tokenized_in(folder: str | None, name: str, make: Callable[[], Dataset]) -> Dataset:
    """Read a tokenized split from a folder, or make it and keep it there; without a folder only make it.

    Args:
        folder: where it is kept; None for nowhere.
        name: differs for all that the split depends on, see `digest_of_tokens`.
        make: makes the split.
    """
    if folder is None:
        return make()
    place = Path(folder) / TOKENIZED / name
    if not is_kept(place):
        made = make()
        try:
            with alone_in(place):
                if not is_kept(place):  # by another run, meanwhile
                    write_folder(place, lambda partial: made.save_to_disk(str(partial)), made.data.nbytes)
        except InUseError:
            return made  # another run is keeping the same
    return load_from_disk(str(place))


def is_kept(place: Path) -> bool:
    """Return True if a folder holds an undamaged split."""
    return read_manifest(place) is not None and not damage(place)


def digest_of_tokens(
    pairs: Mapping[str, Sequence[str]], tokenizer: PreTrainedTokenizerBase, settings: Sequence[Any]
) -> str:
    """Return a name for tokenized pairs; it changes with each sentence, file of the tokenizer, and setting."""
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


PORTION = 1000  # pairs that a process takes at a time


def tokenized_by(
    processes: int, pairs: Mapping[str, list[str]], tokenizer: PreTrainedTokenizerBase, settings: tuple, name: str
) -> Dataset:
    """Tokenize pairs in several processes, as `tokenize` does and in their order.

    The processes are spawned: one that is forked after torch has used threads can wait for them forever.

    Args:
        processes: number of processes.
        pairs: "source" and "target" -> sentences.
        tokenizer: with its languages set, where it has any.
        settings: the other arguments of `tokenize`: prefix, longest source, longest target.
        name: of the split, for the progress bar.
    """
    sides = {side: chunked(sentences, PORTION) for side, sentences in pairs.items()}
    portions = [dict(zip(sides, rows, strict=True)) for rows in zip(*sides.values(), strict=True)]
    prefix, max_source, max_target = settings
    work = partial(tokenize, tokenizer=tokenizer, prefix=prefix, max_source=max_source, max_target=max_target)
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        made = list(progress_bar(pool.map(work, portions), desc=f"tokenizing {name}", total=len(portions)))
    return Dataset.from_dict({column: [row for part in made for row in part[column]] for column in made[0]})


def train_tokenizer(
    model_type: str,
    sentences: Iterable[str],
    size: int,
    folder: Path,
    *,
    source_lang: str | None = None,
    target_lang: str | None = None,
    max_length: int = 512,
) -> PreTrainedTokenizerBase:
    """Train one vocabulary for both languages and make the model type's own tokenizer of it.

    Args:
        model_type: "marian" or "t5".
        sentences: of both languages.
        size: pieces, special ones included.
        folder: for the tokenizer's files; keep it as long as the tokenizer is used.
        source_lang: noted in the tokenizer.
        target_lang: noted in the tokenizer.
        max_length: the longest input of the model, in pieces.

    Returns:
        The tokenizer; `len(tokenizer)` is `size`.
    """
    known = blueprints()
    check_choice("model type for a vocabulary from scratch", model_type, known)
    layout = known[model_type].vocabulary
    proto = train_pieces(sentences, size, outside=int(layout.table), special=layout.special)
    folder.mkdir(parents=True, exist_ok=True)
    for name in layout.files:
        (folder / name).write_bytes(proto)
    if layout.table:
        processor = sentencepiece.SentencePieceProcessor(model_proto=proto)
        pieces = [*(processor.id_to_piece(i) for i in range(processor.get_piece_size())), "<pad>"]
        (folder / "vocab.json").write_text(json.dumps({p: i for i, p in enumerate(pieces)}), encoding="utf-8")
    settings: dict[str, object] = {
        "tokenizer_class": layout.tokenizer,
        "source_lang": source_lang,
        "target_lang": target_lang,
    }
    settings |= {"model_max_length": max_length, "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"extra_ids": 0}), encoding="utf-8")
    return AutoTokenizer.from_pretrained(folder)


def train_pieces(sentences: Iterable[str], size: int, outside: int, special: Mapping[str, int]) -> bytes:
    """Train a unigram SentencePiece model of `size - outside` pieces and return its serialized form.

    It uses one thread, so that the result is reproducible.
    """
    model = io.BytesIO()
    options: dict[str, Any] = {"model_type": "unigram", "character_coverage": 1.0, "bos_id": -1, **special}
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            vocab_size=size - outside,
            num_threads=1,
            minloglevel=2,
            **options,
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).strip()
        if limit := re.search(r"value <= (\d+)", reason):
            reason = f"the training data does not allow so many pieces: {int(limit[1]) + outside} at most"
        elif limit := re.search(r"required_chars\. \d+ vs (\d+)", reason):
            reason = f"too few for the characters of the training data, which need {int(limit[1]) + outside} at least"
        raise DataError(f"--vocab_size {size}: {reason}") from error
    return model.getvalue()
