"""A SentencePiece vocabulary trained from the data, for models that start from scratch.

Source: Kudo, Richardson 2018, arXiv:1808.06226 (unigram language model: Kudo 2018, arXiv:1804.10959).
"""

import io
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import sentencepiece
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from collab_heads.base.checks import check_choice
from collab_heads.contract.registry import blueprints
from collab_heads.errors import DataError


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

    Raises:
        ArgumentError: if the model type has no such tokenizer.
        DataError: if the sentences do not allow so many pieces, or need more; the message says how many.
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
