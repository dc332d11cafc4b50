"""Tiny models of every translation family, and tokenizers for them, for tests of the translation script."""

import json
from pathlib import Path

import torch
from transformers import (
    AddedToken,
    AutoModelForSeq2SeqLM,
    BartConfig,
    M2M100Config,
    M2M100Tokenizer,
    MarianConfig,
    MBart50Tokenizer,
    MBartConfig,
    MBartTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5Config,
)
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

from collab_heads.data.parallel import Corpus
from collab_heads.data.tokenizing import train_tokenizer
from collab_heads.demo import corpus

VOCABULARY = 90
WORDS = sorted({word for side in corpus(300, 0) for line in side for word in line.split()})
CONFIGS = {
    "marian": MarianConfig,
    "bart": BartConfig,
    "mbart": MBartConfig,
    "m2m_100": M2M100Config,
    "t5": T5Config,
}
IDS = {  # end, padding, decoder start; mBART's starts from the last label, its language
    "marian": (0, 89, 89),
    "bart": (2, 1, 2),
    "mbart": (2, 1, None),
    "m2m_100": (2, 1, 2),
    "t5": (1, 0, 0),
}


def model(family: str, size: int = VOCABULARY, dropout: float = 0.0, **more) -> PreTrainedModel:
    """A random one: a layer each, width 32, 4 heads."""
    torch.manual_seed(0)
    end, padding, start = IDS[family]
    ids = {"eos_token_id": end, "pad_token_id": padding, "decoder_start_token_id": start, "vocab_size": size}
    if family == "t5":
        sizes = {"num_layers": 1, "num_heads": 4, "d_kv": 8, "d_ff": 48, "dropout_rate": dropout}
    else:
        sizes = {"dropout": dropout, "max_position_embeddings": 64, "encoder_layerdrop": 0.0, "init_std": 0.2}
        for side in ("encoder", "decoder"):
            sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
    if family == "marian":
        sizes |= {"decoder_vocab_size": size, "bos_token_id": None, "forced_eos_token_id": end}
    return AutoModelForSeq2SeqLM.from_config(CONFIGS[family](d_model=32, **{**sizes, **ids, **more}))


def pairs(count: int, seed: int) -> dict[str, list[str]]:
    """Sentences of the invented language and their English translations."""
    english, invented = corpus(count, seed)
    return {"source": invented, "target": english}


def data(**counts: int) -> Corpus:
    """Generated pairs for each split."""
    splits = {split: pairs(count, seed) for seed, (split, count) in enumerate(counts.items())}
    return Corpus("generated", splits, dict.fromkeys(splits, 0))


def tokenizer(family: str, folder: Path) -> PreTrainedTokenizerBase:
    """One for a family whose vocabulary we train, over both languages."""
    found = pairs(300, 0)
    return train_tokenizer(family, found["source"] + found["target"], VOCABULARY, folder)


def multilingual(kind: str, folder: Path) -> PreTrainedTokenizerBase:
    """A word-level tokenizer with language codes: mBART's, mBART-50's, or M2M100's."""
    if kind == "m2m_100":
        found = pairs(300, 0)
        train_tokenizer("t5", found["source"] + found["target"], VOCABULARY, folder)
        pieces = ["<s>", "<pad>", "</s>", "<unk>", *(piece for piece in spoken(folder / "spiece.model"))]
        (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}), encoding="utf-8")
        # where a checkpoint has its codes: after the pieces, in the order of the languages
        codes = {len(pieces) + i: f"__{code}__" for i, code in enumerate(FAIRSEQ_LANGUAGE_CODES["m2m100"])}
        added = {i: AddedToken(code, special=True, normalized=False) for i, code in codes.items()}
        files = str(folder / "vocab.json"), str(folder / "spiece.model")
        return M2M100Tokenizer(*files, added_tokens_decoder=added, additional_special_tokens=list(codes.values()))
    special = [(piece, 0.0) for piece in ("<s>", "<pad>", "</s>", "<unk>")]
    words = [("\u2581", -2.0), *((f"\u2581{word}", -3.0) for word in WORDS)]
    return {"mbart": MBartTokenizer, "mbart50": MBart50Tokenizer}[kind](vocab=special + words)


def spoken(path: Path) -> list[str]:
    """The pieces of a SentencePiece model that are not special."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [model.id_to_piece(i) for i in range(3, model.get_piece_size())]
