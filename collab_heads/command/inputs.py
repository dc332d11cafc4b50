"""The model and the tokenizer of a command, and its texts as batches."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.base.extras import check_extra
from collab_heads.command.places import file_and_weight
from collab_heads.command.texts import drawn
from collab_heads.contract.registry import adapter_for_config, get_adapter
from collab_heads.data.batches import Collate, check_room, chunked, longest_first, tokenize, with_padding
from collab_heads.data.parallel import Pairs
from collab_heads.errors import ArgumentError, LoadError, UnsupportedModelError
from collab_heads.running.batches import longest_input, reads_texts
from collab_heads.running.generation import generate_batches
from collab_heads.running.translations import translations
from collab_heads.saving.loading import check_device, class_of, load_named, load_or_explain, placed


class Loaded(NamedTuple):
    """A loaded model of the class that its config names, in float32, with its tokenizer and its stored dtype.

    Attributes:
        dtype: the dtype in which the model is stored.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype


class LoadedOfAnyKind(NamedTuple):
    """The same of a model that may read images or audio, and have no tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    dtype: torch.dtype


def load(args: Namespace) -> Loaded:
    """Load the model that the flags name."""
    found = load_of_any_kind(args, needs_tokenizer=True)
    return Loaded(found.model, cast(PreTrainedTokenizerBase, found.tokenizer), found.dtype)


def load_of_any_kind(args: Namespace, *, needs_tokenizer: bool = False) -> LoadedOfAnyKind:
    """Load the model that the flags name; one that reads no texts may have no tokenizer, unless it is needed."""
    device = getattr(args, "device", "cpu")
    check_device(device)
    remote = {"trust_remote_code": args.trust_remote_code}
    config = load_or_explain(AutoConfig, args.model, **remote)
    adapter_for_config(config)
    named, dtype = class_of(config), torch.float32 if config.dtype is None else config.dtype
    if not isinstance(dtype, torch.dtype):
        raise LoadError(f"{args.model}: the dtype in its config.json is {dtype!r:.80}, none that torch has")
    names: list[str] = getattr(args, "data", None) or []
    if len(names) == 2 and not config.is_encoder_decoder and file_and_weight(names[0])[1] is None:
        raise ArgumentError(
            f"--data has two files, and {named.__name__} does not translate: give one, or both in a mixture, "
            f"with their weights ({names[0]}:1 {names[1]}:1)"
        )
    tokenizer = None
    try:
        tokenizer = load_tokenizer(args.model, remote)
    except ArgumentError:
        if needs_tokenizer or named is AutoModel or reads_texts(named):
            raise
    model = load_named(config, args.model, dtype=torch.float32, **({} if named is not AutoModel else remote))
    get_adapter(model)
    return LoadedOfAnyKind(placed(model, device), tokenizer, dtype)


def load_tokenizer(name: str, remote: Mapping) -> PreTrainedTokenizerBase:
    try:
        return load_or_explain(AutoTokenizer, name, **remote)
    except ArgumentError as error:
        if "sentencepiece" in str(error).lower():
            check_extra("train", "such tokenizers", ("sentencepiece",))
        raise


def check_class(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if transformers lacks the class that its config names: its head would be lost."""
    named = model.config.architectures
    if named and type(model).__name__ not in named and not hasattr(transformers, named[0]):
        raise UnsupportedModelError(
            f"the model is a {named[0]}, which transformers lacks, and would lose its head as a "
            f"{type(model).__name__}: load it in Python, and change it there"
        )


def longest(args: Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most tokens that a sentence may have: `--max_length`, or what the model can read if that is less."""
    return min(args.max_length, longest_input(model, tokenizer) or args.max_length)


def encoded(args: Namespace, tokenizer: PreTrainedTokenizerBase, texts: Pairs, **limits: Any) -> Mapping[str, list]:
    """Tokenize the input of an encoder, single texts or pairs; the limits are arguments of the tokenizer."""
    return tokenizer([args.source_prefix + line for line in texts["source"]], texts.get("target"), **limits)


def report_cut(args: Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Pairs) -> None:
    """Print how many sentences, or pairs, are cut because they have more tokens than `longest`."""
    most = longest(args, model, tokenizer)
    if model.config.is_encoder_decoder:
        sides = [encoded(args, tokenizer, {"source": texts["source"]})["input_ids"]]
        if "target" in texts:
            sides.append(tokenizer(text_target=texts["target"])["input_ids"])
    else:
        sides = [encoded(args, tokenizer, texts)["input_ids"]]
    if cut := sum(max(map(len, rows)) > most for rows in zip(*sides, strict=True)):
        why = "--max_length" if most == args.max_length else "this model reads no more"
        print(f"cut {cut:,} of {len(texts['source']):,} sentences to {most} tokens ({why})")


def batches_of(args: Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Pairs) -> list[dict]:
    """Return batches of sentences of similar length, and print how many were cut to `longest`.

    Batches of a translation model have labels: the target texts, or the model's own translations if there are none.
    """
    most = longest(args, model, tokenizer)
    check_room("--max_length", most, tokenizer, "target" in texts and not model.config.is_encoder_decoder)
    report_cut(args, model, tokenizer, texts)
    if not model.config.is_encoder_decoder:
        columns = encoded(args, tokenizer, texts, truncation=True, max_length=most)
        groups = longest_first(list(map(len, columns["input_ids"])), args.batch_size)
        rows = [{name: values[i] for name, values in columns.items()} for i in range(len(texts["source"]))]
        pad = with_padding(tokenizer, model.config).pad
        return [dict(pad([rows[i] for i in group], return_tensors="pt")) for group in groups]
    if "target" not in texts:
        texts = {**texts, "target": own_translations(args, model, tokenizer, texts["source"])}
    pairs = tokenize(texts, tokenizer, args.source_prefix, most, most)
    collate = Collate(model, tokenizer.pad_token_id)
    groups = longest_first(list(map(len, pairs["input_ids"])), args.batch_size)
    return [collate([{name: rows[i] for name, rows in pairs.items()} for i in group]) for group in groups]


def own_translations(
    args: Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Sequence[str]
) -> list[str]:
    """Translate sentences greedily with the model."""
    most = longest(args, model, tokenizer)
    batches = (
        encoded(args, tokenizer, {"source": lines}, padding=True, truncation=True, max_length=most, return_tensors="pt")
        for lines in chunked(source, args.batch_size)
    )
    return [text for texts in translations(model, tokenizer, batches, most, num_beams=1) for text in texts]


def chosen_sentences(
    args: Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Pairs
) -> list[str | tuple[str, str]]:
    """Return the texts as `analyze_heads` takes sentences: pairs for a translation model, or of two files."""
    if model.config.is_encoder_decoder and "target" not in texts:
        texts = {**texts, "target": own_translations(args, model, tokenizer, texts["source"])}
    source = [args.source_prefix + line for line in texts["source"]]
    return list(zip(source, texts["target"], strict=True)) if "target" in texts else list(source)


def calibration(args: Namespace, loaded: Loaded, texts: Pairs | None) -> list[Mapping] | None:
    """Return batches of `--samples` sentences of `--data`; None without data.

    Args:
        args: the flags.
        loaded: the model and its tokenizer.
        texts: the content of `--data`, which is read before a model is loaded.
    """
    if texts is None:
        return None
    return list(batches_of(args, loaded.model, loaded.tokenizer, drawn(texts, args.samples, args.seed)))


def generated(args: Namespace, loaded: Loaded) -> list[dict]:
    """Return batches of the texts that the model writes itself: `--generated` of them, of `--max_length` tokens."""
    if not args.generated:
        return []
    model, tokenizer, _ = loaded
    read = tokenizer("a", return_special_tokens_mask=True)
    start = read["input_ids"][: (read["special_tokens_mask"] + [0]).index(0)]
    most = longest(args, model, tokenizer)
    batches = generate_batches(model, args.generated, most, start=start, seed=args.seed)
    return [{"input_ids": rows} for batch in batches for rows in batch["input_ids"].split(args.batch_size)]
