"""Sentences of the user's choice whose attention is shown: as the model reads them, long texts in pieces."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.errors import ArgumentError
from collab_heads.files.reading import check_field
from collab_heads.running.batches import longest_input

LONGEST = 512  # tokens of a piece: the maps of more are too large to show
KINDS = "texts, pairs of texts or input dicts"
Chosen = str | tuple[str, str] | Mapping


def check_sentences(sentences: Iterable[Chosen]) -> tuple[Chosen, ...]:
    """Return the sentences as a tuple; raise ArgumentError for what is neither a text, a pair nor a dict, or empty."""
    if isinstance(sentences, Mapping | str | Tensor):
        raise ArgumentError(f"sentences is a single {type(sentences).__name__}: pass a list of {KINDS}")
    found = tuple(sentences)
    for place, sentence in enumerate(found):
        texts = () if isinstance(sentence, Mapping) else sentence if isinstance(sentence, tuple) else (sentence,)
        if not all(isinstance(text, str) for text in texts):
            raise ArgumentError(f"sentences[{place}] is {sentence!r:.80}: pass {KINDS}")
        if not all(texts):
            raise ArgumentError(f"sentences[{place}] has an empty text: leave it out")
        for text in texts:
            check_field(f"sentences[{place}]", None, text)
    return found


def chosen_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, sentences: Sequence[Chosen]
) -> tuple[list[Mapping], list[str]]:
    """Return the inputs of the chosen sentences, and notes on those that are shown in pieces.

    Args:
        model: tells how many tokens it reads.
        tokenizer: the model's; needed for texts.
        sentences: texts, pairs of texts, or input dicts, which stay as they are.

    Raises:
        ArgumentError: if there is no tokenizer for a text, a text is given to an encoder-decoder, which needs pairs, or
            a pair is longer than the model reads.
    """
    batches: list[Mapping] = []
    notes: list[str] = []
    for place, sentence in enumerate(sentences):
        if isinstance(sentence, Mapping):
            batches.append(sentence)
            continue
        if tokenizer is None:
            raise ArgumentError(f"sentences[{place}] is a text, which needs the model's tokenizer: pass tokenizer=")
        most = min(longest_input(model, tokenizer) or LONGEST, LONGEST)
        if isinstance(sentence, str):
            if model.config.is_encoder_decoder:
                raise ArgumentError(
                    f"sentences[{place}] is a single text, and this {type(model).__name__} also reads what it "
                    "generates: pass a pair (text, translation)"
                )
            pieces = pieces_of(tokenizer, sentence, most)
            if len(pieces) > 1:
                notes.append(
                    f"the sentence {beginning(sentence)!r} is shown in {len(pieces)} pieces of at most {most} tokens"
                )
            batches += pieces
        else:
            batches.append(pair_inputs(model, tokenizer, sentence, place, most))
    return batches, notes


def pieces_of(tokenizer: PreTrainedTokenizerBase, text: str, most: int) -> list[Mapping]:
    """Return the inputs of a text, in pieces of at most `most` tokens; each has the special tokens at its ends."""
    read = tokenizer(text, return_special_tokens_mask=True)
    ids, special = list(read["input_ids"]), list(read["special_tokens_mask"])
    begin = next((place for place, each in enumerate(special) if not each), len(ids))
    end = len(ids) - next((place for place, each in enumerate(special[::-1]) if not each), 0)
    room = max(1, most - begin - (len(ids) - end))
    pieces = [
        [*ids[:begin], *ids[at : min(at + room, end)], *ids[end:]] for at in range(begin, max(end, begin + 1), room)
    ]
    return [{"input_ids": torch.tensor([each]), "attention_mask": torch.ones(1, len(each)).long()} for each in pieces]


def pair_inputs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pair: tuple[str, str], place: int, most: int
) -> Mapping:
    if model.config.is_encoder_decoder:
        read = dict(tokenizer(pair[0], return_tensors="pt"))
        read["labels"] = tokenizer(text_target=pair[1], return_tensors="pt")["input_ids"]
    else:
        read = dict(tokenizer(*pair, return_tensors="pt"))
    longest = max(read[name].shape[1] for name in ("input_ids", "labels") if name in read)
    if longest > most:
        raise ArgumentError(f"sentences[{place}] has {longest} tokens, and pairs may have {most}: pass a shorter pair")
    return read


def beginning(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"
