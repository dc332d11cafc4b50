"""Tie stored weights to the vocabulary that their rows stand for, and check that tokenizers fit.

A row of an embedding says nothing about its token. So the vocabulary, token -> id, is recorded as a digest: by
`trim_vocabulary` in the config, and for other changed models in the metadata of the weights, where the folder that they
were loaded from has a tokenizer. Loading compares the digest with the files of the tokenizer in the same folder.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from collab_heads.errors import ArgumentError, ConfigError, DataError
from collab_heads.files.reading import parse_json, read_text
from collab_heads.sites.record import TRIMMED

logger = logging.getLogger(__name__)

Vocabularies = Sequence[Mapping[str, int]]  # token -> id; two where encoder and decoder have their own

VOCABULARY = "collab_heads_vocabulary"  # in the metadata of a file of weights
SAID = re.compile(r"(\d{1,9}(?:\+\d{1,9})?):[0-9a-f]{32}")
SPARE = 1024  # rows without a token that a model may have: its number of rows is often rounded up
MADE_UP = 2000  # tokenizers without files have fewer tokens


def digest(vocabularies: Vocabularies, sizes: Sequence[int] | None = None) -> str:
    """Return the sizes of vocabularies, and a digest of their tokens with smaller ids; later tokens may be added."""
    counted = sizes or list(map(size, vocabularies))
    below = [
        sorted((number, token) for token, number in vocabulary.items() if number < most)
        for vocabulary, most in zip(vocabularies, counted, strict=True)
    ]
    return f"{'+'.join(map(str, counted))}:{hashlib.sha256(json.dumps(below).encode()).hexdigest()[:32]}"


def size(vocabulary: Mapping[str, int]) -> int:
    return 1 + max(vocabulary.values(), default=-1)


def is_same(said: object, vocabularies: Vocabularies) -> bool:
    """Return True if vocabularies have the tokens of a digest, and perhaps others behind them."""
    if not isinstance(said, str) or (match := SAID.fullmatch(said)) is None:
        return False
    sizes = list(map(int, match[1].split("+")))
    enough = len(sizes) == len(vocabularies) and all(map(int.__le__, sizes, map(size, vocabularies)))
    return enough and digest(vocabularies, sizes) == said


def tokens_in(said: object, vocabularies: Vocabularies | None = None) -> str:
    match = SAID.fullmatch(str(said))
    sizes = map(int, match[1].split("+")) if match else map(len, vocabularies or ())
    return " and ".join(f"{each:,}" for each in sizes) or "an unknown number of"


def is_pair(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if a tokenizer is one as Marian's, with a SentencePiece model for each side."""
    return {"spm_source", "spm_target", "encoder"} <= vars(tokenizer).keys()


def vocabularies_of(tokenizer: PreTrainedTokenizerBase) -> Vocabularies:
    """Return the vocabularies of a tokenizer: of Marian's, those in its files."""
    held: Any = tokenizer
    if is_pair(tokenizer):
        return (dict(held.encoder), *((dict(held.target_encoder),) if held.separate_vocabs else ()))
    return (tokenizer.get_vocab(),)


def read_vocabularies(folder: Path) -> Vocabularies | None:
    """Read the vocabularies in the files of a tokenizer, without making it.

    Returns:
        None if there are none, or they are in another form (SentencePiece alone) or damaged: whoever loads the
        tokenizer is told.
    """
    try:
        if (file := folder / "tokenizer.json").is_file():
            data = parse_json(read_text(file))
            stored = data["model"]["vocab"]
            vocabulary = dict(stored) if isinstance(stored, dict) else {each[0]: n for n, each in enumerate(stored)}
            found = [vocabulary | {each["content"]: each["id"] for each in data.get("added_tokens") or ()}]
        elif (file := folder / "vocab.json").is_file():
            files = [each for each in (file, folder / "target_vocab.json") if each.is_file()]
            found = [parse_json(read_text(each)) for each in files]
            found[0] = found[0] | added(folder)
        elif (file := folder / "vocab.txt").is_file():
            found = [{line: n for n, line in enumerate(read_text(file).split("\n")) if line} | added(folder)]
        else:
            return None
        pairs = [pair for side in found for pair in side.items()]
        return found if all(isinstance(token, str) and isinstance(number, int) for token, number in pairs) else None
    except (DataError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None


def added(folder: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    if (file := folder / "added_tokens.json").is_file():
        found |= parse_json(read_text(file))
    if (file := folder / "tokenizer_config.json").is_file():
        decoder = parse_json(read_text(file)).get("added_tokens_decoder") or {}
        found |= {each["content"]: int(number) for number, each in decoder.items()}
    return found


def fits(config: PretrainedConfig, vocabularies: Vocabularies) -> bool:
    """Return True if a model has a row for every token, and few others."""
    text = config.get_text_config(decoder=False)
    sides = (getattr(text, "vocab_size", None), getattr(config, "decoder_vocab_size", None))
    return all(
        not isinstance(rows, int) or size(vocabulary) <= rows <= size(vocabulary) + SPARE
        for rows, vocabulary in zip(sides, vocabularies, strict=False)
    )


def trimmed_digest(config: PretrainedConfig) -> object:
    """Return the digest of the vocabulary to which a model was trimmed; None if there is none."""
    said = getattr(config, TRIMMED, None)
    return said.get("digest") if isinstance(said, Mapping) else None


def check_vocabulary(config: PretrainedConfig, folder: Path, said: object) -> None:
    """Check that the tokenizer beside stored weights is theirs.

    Which one a trimmed model has is certain, because its rows were chosen. That another changed model still has the
    tokenizer that it was loaded with is only likely: its owner may have trained it with another one.

    Args:
        config: the config of the model.
        folder: holds the weights.
        said: the digest in the metadata of the weights, if there is one.

    Raises:
        ConfigError: if the model was trimmed, and the tokenizer is another one.
    """
    trimmed = trimmed_digest(config)
    if trimmed is None and said is None:
        return
    found = read_vocabularies(folder)
    if found is None or is_same(trimmed or said, found):
        return
    if trimmed is not None:
        raise ConfigError(
            f"the tokenizer in {folder} ({tokens_in(None, found)} tokens) is not that of the model beside it, whose "
            f"vocabulary was trimmed to {tokens_in(trimmed)} tokens: it would read words as others. Save the tokenizer "
            "that trim_vocabulary returned there. If you trained the model with this tokenizer after trimming, "
            f"remove {TRIMMED!r} from its config.json"
        )
    logger.warning(
        "the tokenizer in %s (%s tokens) is not the one that the model was loaded with before it was saved there (%s "
        "tokens), and may read words as others: save its tokenizer there. If it was trained with this one, all is well",
        folder,
        tokens_in(None, found),
        tokens_in(said),
    )


def check_words(tokenizer: object, source: object = None) -> None:
    """Check that a tokenizer knows words.

    transformers makes one of special tokens alone for a folder without the files of a tokenizer; all texts are unknown
    to it.

    Raises:
        ArgumentError: if it knows none.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or len(tokenizer) > MADE_UP:
        return
    known = tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    if len(known) <= 1:  # some have one more, for spaces
        where = source or tokenizer.name_or_path
        raise ArgumentError(
            f"{f'{str(where)!r} has no tokenizer' if where else 'the tokenizer knows no words'}: transformers made a "
            f"{type(tokenizer).__name__} of {len(tokenizer)} special tokens, to which every word is unknown. Save the "
            "model's own tokenizer there (tokenizer.save_pretrained), or copy its files"
        )
