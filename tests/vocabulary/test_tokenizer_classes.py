"""trim_vocabulary with the tokenizer classes of transformers: equal when trimmed, saved and loaded in every way."""

import json

import pytest
import torch
import transformers
from slow_cases import slow
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from tokenizers_made import FEW, TEXTS
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from trimming import bert, states, tokens_of

from collab_heads import trim_vocabulary

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
MARKED = [f"▁{text.replace(' ', ' ▁')}" for text in TEXTS]  # words as SentencePiece writes them


def model_of(made: Tokenizer) -> dict:
    return json.loads(made.to_str())["model"]


def special_last(vocabulary: dict[str, int], special: list[str]) -> dict[str, int]:
    """The same tokens, those that are special behind all others: so trimming changes their ids."""
    tokens = sorted(vocabulary, key=lambda token: (token in special, vocabulary[token]))
    return {token: number for number, token in enumerate(tokens)}


def wordpieces(special: list[str]) -> dict:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=250, special_tokens=special))
    return {"vocab": special_last(model_of(made)["vocab"], special)}


def byte_merges(special: list[str], **more) -> dict:
    made = Tokenizer(models.BPE(**more))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet, **more)
    made.train_from_iterator(TEXTS, trainer)
    found = model_of(made)
    return {"vocab": special_last(found["vocab"], special), "merges": [tuple(each) for each in found["merges"]]}


def clip_merges() -> dict:
    """Every byte has a form that ends a word."""
    found = byte_merges(["<|startoftext|>", "<|endoftext|>"], end_of_word_suffix="</w>")
    ends = [f"{each}</w>" for each in pre_tokenizers.ByteLevel.alphabet()]
    new = [each for each in ends if each not in found["vocab"]]
    return found | {"vocab": found["vocab"] | {each: len(found["vocab"]) + place for place, each in enumerate(new)}}


def word_merges(special: list[str]) -> dict:
    """Merges of a SentencePiece model, with bytes for what is not a character of it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.train_from_iterator(MARKED, trainers.BpeTrainer(vocab_size=550, special_tokens=[*special, *BYTES]))
    found = model_of(made)
    return {"vocab": special_last(found["vocab"], special), "merges": [tuple(each) for each in found["merges"]]}


def scores(special: list[str]) -> dict:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>")
    made.train_from_iterator(TEXTS, trainer)
    return {"vocab": [tuple(each) for each in model_of(made)["vocab"]]}


MADE = {
    "BertTokenizer": lambda: wordpieces(BERT),
    "MPNetTokenizer": lambda: wordpieces(["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]),
    "ElectraTokenizer": lambda: wordpieces(BERT),
    "RobertaTokenizer": lambda: byte_merges(ROBERTA),
    "BartTokenizer": lambda: byte_merges(ROBERTA),
    "GPT2Tokenizer": lambda: byte_merges(["<|endoftext|>"]) | {"pad_token": "<|endoftext|>"},
    "WhisperTokenizer": lambda: byte_merges(["<|endoftext|>"]) | {"pad_token": "<|endoftext|>"},
    "Qwen2Tokenizer": lambda: byte_merges(["<|endoftext|>"]),
    "CLIPTokenizer": clip_merges,
    "T5Tokenizer": lambda: scores(["<pad>", "</s>", "<unk>"]),
    "XLMRobertaTokenizer": lambda: scores(ROBERTA),
    "AlbertTokenizer": lambda: scores(["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]),
    "MBartTokenizer": lambda: scores(ROBERTA) | {"src_lang": "en_XX", "tgt_lang": "de_DE"},
    "MBart50Tokenizer": lambda: scores(["<unk>", "<s>", "</s>"]) | {"src_lang": "en_XX", "tgt_lang": "de_DE"},
    "PegasusTokenizer": lambda: scores(["<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk>"]),
    "CamembertTokenizer": lambda: scores(ROBERTA),
    "NllbTokenizer": lambda: word_merges(ROBERTA) | {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn"},
    "GemmaTokenizer": lambda: word_merges(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]),
    "LlamaTokenizer": lambda: word_merges(["<unk>", "<s>", "</s>"]) | {"pad_token": "</s>"},
}


def tokens_of_pair(tokenizer) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(FEW[0], FEW[1])["input_ids"])


def count_unknown(tokenizer) -> int:
    return sum(row.count(tokenizer.unk_token) for row in tokens_of(tokenizer, TEXTS))


# one of each algorithm and of each way to mark languages; the others have other special tokens
BY_DEFAULT = (
    *("BertTokenizer", "RobertaTokenizer", "GPT2Tokenizer", "CLIPTokenizer", "T5Tokenizer", "XLMRobertaTokenizer"),
    *("MBartTokenizer", "NllbTokenizer", "LlamaTokenizer"),
)


@pytest.mark.parametrize("name", [*BY_DEFAULT, *slow(*(name for name in MADE if name not in BY_DEFAULT))])
def test_a_class_is_trimmed_saved_and_loaded(name, tmp_path):
    tokenizer = getattr(transformers, name)(**MADE[name]())
    model = bert(tokenizer)
    expected = states(model, tokenizer, FEW)
    small, report = trim_vocabulary(model, tokenizer, FEW)
    ids = small.get_vocab()
    assert type(small) is type(tokenizer) and len(small) == report.tokens_after < 0.95 * len(tokenizer)
    assert set(ids) < set(tokenizer.get_vocab()) and sorted(ids.values()) == [*range(len(small))]
    assert small.special_tokens_map == tokenizer.special_tokens_map
    model.save_pretrained(tmp_path)
    small.save_pretrained(tmp_path)
    for each in (small, AutoTokenizer.from_pretrained(tmp_path), type(tokenizer).from_pretrained(tmp_path)):
        assert type(each) is type(tokenizer) and each.get_vocab() == ids
        assert tokens_of(each, FEW) == tokens_of(tokenizer, FEW)
        assert torch.equal(states(model, each, FEW), expected)
        assert tokens_of_pair(each) == tokens_of_pair(tokenizer)
        assert each(TEXTS)["input_ids"] == small(TEXTS)["input_ids"]
        assert each.decode(each(FEW[0])["input_ids"]) == tokenizer.decode(tokenizer(FEW[0])["input_ids"])
        assert count_unknown(each) == count_unknown(tokenizer)


@pytest.mark.parametrize("kind", ["Template", "Bert", "Roberta", "Sequence"])
def test_what_is_put_around_a_text_gets_its_new_ids(kind, tmp_path):
    """Named classes make it from their tokens; of other tokenizers it is data."""
    vocabulary = wordpieces(BERT)["vocab"]
    first, last = (("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"]))
    around = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    around.pre_tokenizer = pre_tokenizers.Whitespace()
    around.post_processor = {
        "Template": processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", [first, last]),
        "Bert": processors.BertProcessing(last, first),
        "Roberta": processors.RobertaProcessing(last, first),
        "Sequence": processors.Sequence([processors.RobertaProcessing(last, first)]),
    }[kind]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=around, pad_token="[PAD]", unk_token="[UNK]")
    small, _ = trim_vocabulary(bert(tokenizer), tokenizer, FEW)
    small.save_pretrained(tmp_path)
    assert small.get_vocab()["[CLS]"] != first[1]
    for each in (small, AutoTokenizer.from_pretrained(tmp_path)):
        assert tokens_of(each, FEW) == tokens_of(tokenizer, FEW)
        assert tokens_of_pair(each) == tokens_of_pair(tokenizer)
    alone = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))  # as other programs read it
    assert [each.ids for each in alone.encode_batch(FEW)] == small(FEW)["input_ids"]


SPEECH = ["<|startoftranscript|>", "<|en|>", "<|zh|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|notimestamps|>"]
SET = {
    "WhisperTokenizer": ("<|de|>", lambda made: made.set_prefix_tokens(language="de", task="transcribe")),
    "MBartTokenizer": ("de_DE", lambda made: setattr(made, "src_lang", "de_DE")),
    "NllbTokenizer": ("deu_Latn", lambda made: setattr(made, "src_lang", "deu_Latn")),
}


@pytest.mark.parametrize("name", SET)
def test_the_language_that_a_tokenizer_was_set_to_stays(name, tmp_path):
    tokenizer, (language, change) = getattr(transformers, name)(**MADE[name]()), SET[name]
    if name == "WhisperTokenizer":
        tokenizer.add_special_tokens({"extra_special_tokens": SPEECH})
    change(tokenizer)
    small, _ = trim_vocabulary(bert(tokenizer), tokenizer, FEW)
    small.save_pretrained(tmp_path)
    for each in (tokenizer, small, AutoTokenizer.from_pretrained(tmp_path), type(tokenizer).from_pretrained(tmp_path)):
        assert language in tokens_of(each, FEW)[0] and tokens_of(each, FEW) == tokens_of(tokenizer, FEW)


def test_tokens_that_a_user_added_stay(tmp_path):
    tokenizer = transformers.GPT2Tokenizer(**byte_merges(["<|endoftext|>"]))
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.add_tokens(["hijk"])
    texts = [f"hijk{text}" for text in FEW]
    assert tokens_of(tokenizer, texts)[0][0] == "hijk"
    small, _ = trim_vocabulary(bert(tokenizer), tokenizer, FEW)
    small.save_pretrained(tmp_path)
    for each in (small, AutoTokenizer.from_pretrained(tmp_path)):
        assert tokens_of(each, texts) == tokens_of(tokenizer, texts)
        assert each.pad_token == "<pad>" and each.pad_token_id == small.get_vocab()["<pad>"] < tokenizer.pad_token_id
