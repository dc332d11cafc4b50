"""Tokenizers of every kind, trained on a few sentences."""

import io
import json
import random
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaTokenizer, MarianTokenizer, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
CHANCE = random.Random(0)
STEMS = ["".join(CHANCE.choices("abcdefgh", k=CHANCE.randint(1, 3))) for _ in range(40)]
WORDS = [CHANCE.choice(STEMS) + CHANCE.choice(STEMS) for _ in range(150)]


def sentences(count: int, seed: int, words: list[str] = WORDS) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(words, k=chance.randint(3, 9))) for _ in range(count)]


TEXTS = sentences(400, seed=1)
FEW = sentences(30, seed=2, words=WORDS[:25])  # of some of the words


def wordpiece(texts: list[str]) -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=250, special_tokens=SPECIAL))
    return made


def byte_bpe(texts: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made.train_from_iterator(texts, trainer)
    return made


def bpe_with_ends(texts: list[str]) -> Tokenizer:
    """As CLIP's: the last character of a word is another one."""
    made = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(vocab_size=250, special_tokens=SPECIAL, end_of_word_suffix="</w>")
    made.train_from_iterator(texts, trainer)
    return made


def bpe_with_prefixes(texts: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>", continuing_subword_prefix="##"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=250, special_tokens=SPECIAL, continuing_subword_prefix="##")
    made.train_from_iterator(texts, trainer)
    return made


def unigram(texts: list[str]) -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>")
    made.train_from_iterator(texts, trainer)
    return made


MADE = {
    "WordPiece": wordpiece,
    "byte-level BPE": byte_bpe,
    "BPE with ends": bpe_with_ends,
    "BPE with prefixes": bpe_with_prefixes,
    "Unigram": unigram,
}


def fast(name: str, texts: list[str] = TEXTS) -> PreTrainedTokenizerFast:
    """A tokenizer of these texts, which puts <s> and </s> around one."""
    made = MADE[name](texts)
    around = [(token, made.token_to_id(token)) for token in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B </s>", around)
    names = {
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    }
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def spm(texts: list[str], kind: str, size: int, **options: object) -> bytes:
    """A SentencePiece model, "unigram" or "bpe"."""
    found = io.BytesIO()
    options |= {"vocab_size": size, "model_type": kind, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=found, **options)
    return found.getvalue()


def marian(
    folder: Path, kind: str = "unigram", *, separate: bool = False, size: int = 120, **options: object
) -> MarianTokenizer:
    """Marian's tokenizer: the padding is the last token; source and target have other words."""
    folder.mkdir(exist_ok=True)
    sides = TEXTS, [text.translate(str.maketrans("abcdefgh", "stuvwxyz")) for text in TEXTS]
    pieces = []
    for name, texts in zip(("source", "target"), sides, strict=True):
        content = spm(texts, kind, size, **options)
        (folder / f"{name}.spm").write_bytes(content)
        made = sentencepiece.SentencePieceProcessor(model_proto=content)
        pieces.append([made.id_to_piece(number) for number in range(3, len(made))])
    groups = pieces if separate else [sorted({*pieces[0], *pieces[1]})]
    files = [folder / "vocab.json", folder / "target_vocab.json"][: len(groups)]
    for file, group in zip(files, groups, strict=True):
        tokens = ["</s>", "<unk>", *group, "<pad>"]
        file.write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    more = {"target_vocab_file": str(files[-1])} if separate else {}
    paths = {"source_spm": folder / "source.spm", "target_spm": folder / "target.spm", "vocab": files[0]}
    return MarianTokenizer(**{name: str(path) for name, path in paths.items()}, separate_vocabs=separate, **more)


def pairs(texts: list[str]) -> list[tuple[str, str]]:
    return [(text, text.translate(str.maketrans("abcdefgh", "stuvwxyz"))) for text in texts]


def llama(folder: Path, texts: list[str] = TEXTS, size: int = 420, **options: object) -> LlamaTokenizer:
    """A SentencePiece model as Llama's, with tokens for bytes, as transformers loads it."""
    options = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"} | options
    options |= {"remove_extra_whitespaces": False, "vocab_size": size, "minloglevel": 2}
    folder.mkdir(exist_ok=True)
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=file, **options)
    return LlamaTokenizer.from_pretrained(folder)
