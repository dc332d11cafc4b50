"""The batches that a command shows a model, of texts that are not too long for it."""

import copy
from argparse import Namespace
from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.analysis.treebank.treebank import longest_input
from collab_heads.errors import ArgumentError
from collab_heads.model.backends import evaluating
from collab_heads.training.data.batches import chunked, longest_first
from collab_heads.training.data.collate import Collate, generate, tokenize
from collab_heads.training.data.parallel import Pairs


def fitting(args: Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Pairs) -> Pairs:
    """The sentences, or pairs, that are not longer than `--max_length`; how many are left out is said."""
    most = longest(args, model, tokenizer)
    fits = [i for i, length in enumerate(lengths(args, model, tokenizer, texts)) if length <= most]
    if not fits:
        why = "" if most == args.max_length else f", and this model reads {most} tokens at most"
        raise ArgumentError(f"--max_length {args.max_length}: every sentence of {args.data[0]} is longer{why}")
    if missing := len(texts["source"]) - len(fits):
        print(f"left out {missing} of {len(texts['source']):,} sentences of more than {most} tokens")
    return {side: [lines[i] for i in fits] for side, lines in texts.items()}


def longest(args: Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many tokens a sentence may have: `--max_length`, or what the model can read if that is less."""
    return min(args.max_length, longest_input(model, tokenizer) or args.max_length)


def lengths(args: Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Pairs) -> list[int]:
    """The tokens of each example: of both texts where an encoder reads a pair, of the longer one of a translation."""
    if not model.config.is_encoder_decoder:
        return list(map(len, encoded(args, tokenizer, texts)["input_ids"]))
    sides = [list(map(len, tokenizer([args.source_prefix + line for line in texts["source"]])["input_ids"]))]
    if "target" in texts:
        sides.append(list(map(len, tokenizer(text_target=texts["target"])["input_ids"])))
    return list(map(max, zip(*sides, strict=True))) if len(sides) == 2 else sides[0]


def encoded(args: Namespace, tokenizer: PreTrainedTokenizerBase, texts: Pairs) -> Mapping[str, list]:
    """What an encoder reads: single texts, or pairs."""
    return tokenizer([args.source_prefix + line for line in texts["source"]], texts.get("target"))


def batches_of(args: Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Pairs) -> list[dict]:
    """Batches of sentences of like length; a translation model's with labels: the target, or what it makes itself."""
    if not model.config.is_encoder_decoder:
        columns = encoded(args, tokenizer, texts)
        groups = longest_first(list(map(len, columns["input_ids"])), args.batch_size)
        rows = [{name: values[i] for name, values in columns.items()} for i in range(len(texts["source"]))]
        pad = with_padding(tokenizer).pad
        return [dict(pad([rows[i] for i in group], return_tensors="pt")) for group in groups]
    if "target" not in texts:
        texts = {**texts, "target": translations(args, model, tokenizer, texts["source"])}
    most = longest(args, model, tokenizer)
    pairs = tokenize(texts, tokenizer, args.source_prefix, most, most)
    collate = Collate(model, tokenizer.pad_token_id)
    groups = longest_first(list(map(len, pairs["input_ids"])), args.batch_size)
    return [collate([{name: rows[i] for name, rows in pairs.items()} for i in group]) for group in groups]


def with_padding(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer; where it has no padding token (GPT-2's), a copy that pads with the end of a text, unseen."""
    if tokenizer.pad_token is None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def translations(
    args: Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Sequence[str]
) -> list[str]:
    """What the model makes of the sentences, greedily."""
    translated: list[str] = []
    most = longest(args, model, tokenizer)
    with evaluating(model):
        for batch in chunked(source, args.batch_size):
            texts = [args.source_prefix + line for line in batch]
            inputs = tokenizer(texts, padding=True, return_tensors="pt")
            ids = generate(model, inputs.to(model.device), num_beams=1, max_length=most)
            translated += tokenizer.batch_decode(ids, skip_special_tokens=True)
    return translated
