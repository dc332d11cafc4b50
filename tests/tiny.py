"""A tiny BERT with a tokenizer of its own, and files of examples, for tests of the scripts."""

import csv
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(40)]
INPUTS = ["input_ids", "token_type_ids", "attention_mask"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
PARTS = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}  # of sentence-transformers


def save_tiny_bert(folder: Path, *, dropout: float = 0.1) -> Path:
    """A random BERT, 2 layers, width 32, 4 heads, without a classification head."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, model_input_names=INPUTS, **special
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.1,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def write_modules(folder: Path) -> Path:
    """Make a sentence encoder of a tiny BERT, whose embeddings are means of length 1, as older folders are."""
    listed = [{"type": f"sentence_transformers.models.{name}", "path": path} for name, path in PARTS.items()]
    (folder / "modules.json").write_text(
        json.dumps([{"idx": number, "name": str(number), **each} for number, each in enumerate(listed)])
    )
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def sentence(chance: random.Random, words: list[str]) -> str:
    """A few random words."""
    return " ".join(chance.choices(words, k=chance.randint(3, 9)))


def rows(count: int, seed: int, labels: int = 2) -> list[dict]:
    """Pairs whose label is the part of the vocabulary that the first sentence is from."""
    chance, found, part = random.Random(seed), [], len(WORDS) // labels
    for _ in range(count):
        label = chance.randrange(labels)
        first = sentence(chance, WORDS[label * part : (label + 1) * part])
        found.append({"sentence1": first, "sentence2": sentence(chance, WORDS), "label": label})
    return found


def write_csv(path: Path, examples: list[dict]) -> Path:
    """Write rows with a header line."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(examples[0]))
        writer.writeheader()
        writer.writerows(examples)
    return path


def write_glue(folder: Path, name: str, header: list[str] | None, splits: dict[str, list[list]]) -> Path:
    """Write a task's TSV files: split -> rows of fields."""
    task = folder / name
    task.mkdir(parents=True)
    for split, fields in splits.items():
        lines = [header] if header else []
        text = "".join("\t".join(str(cell) for cell in row) + "\n" for row in [*lines, *fields])
        (task / f"{split}.tsv").write_text(text, encoding="utf-8")
    return folder
